// Between the drivers of the CPU gated delta rule and convolution and their kernels, one set per
// instruction set. As in rerope_cpu.h: plain structs and internal linkage only, no standard library
// templates.
#pragma once

#include <cstdint>

namespace kvspan::cpu {

enum StateType { kStateF32, kStateBF16, kStateF16, kNumStateTypes };

// One sequence, one key head and some of its value heads.
struct GatedDeltaItem {
  StateType type;  // of q, k, v and out
  std::int64_t num_tokens, key_dim, value_dim;
  std::int64_t num_heads;  // value heads

  // First token of the sequence, first of the heads. Strides in elements.
  const void* q;  // null: only the state
  const void* k;
  const void* v;
  void* out;
  std::int64_t q_token_stride, k_token_stride;
  std::int64_t v_token_stride, v_head_stride;
  std::int64_t out_token_stride, out_head_stride;

  const float* alpha;  // exp(g)
  std::int64_t alpha_token_stride, alpha_head_stride;
  const float* beta;
  std::int64_t beta_token_stride, beta_head_stride;

  const float* initial_state;  // null: zero
  std::int64_t initial_head_stride, initial_row_stride;
  float* final_state;
  std::int64_t final_head_stride, final_row_stride;
  bool is_value_key;  // rows of states are value dimensions

  bool l2norm;
  float scale;

  float* workspace;  // workspace_size floats, aligned to 64 bytes
};

// Some tokens of one sequence; see kvspan/causal_conv1d.h. Channels are contiguous throughout.
struct ConvItem {
  std::int64_t num_tokens, num_channels, width;
  const void* x;
  std::int64_t x_token_stride;
  void* out;
  std::int64_t out_token_stride;
  const void* previous;  // [width - 1, num_channels], the inputs before the first token
  std::int64_t previous_stride;
  const void* weight;  // [width, num_channels]
  std::int64_t weight_stride;
  const void* bias;  // [num_channels]; null: none
  bool silu;
};

struct GatedDeltaKernels {
  void (*run)(const GatedDeltaItem& item);
  void (*conv[kNumStateTypes])(const ConvItem& item);
};

GatedDeltaKernels gated_delta_kernels_baseline();
GatedDeltaKernels gated_delta_kernels_avx2();    // x86-64 only
GatedDeltaKernels gated_delta_kernels_avx512();  // x86-64 only

// Columns of a state that are worked on at once; a state in the workspace is a sequence of strips
// of [key_dim, kStrip].
inline constexpr std::int64_t kStrip = 64;
inline constexpr std::int64_t kChunk = 64;

// Where things lie in the workspace, in floats.
struct GatedDeltaWorkspace {
  std::int64_t k, q, k_transposed, gram, scores, system, weights, decay, updates, outputs, state,
      size;
};

constexpr GatedDeltaWorkspace gated_delta_workspace(std::int64_t key_dim, std::int64_t value_dim,
                                                    std::int64_t num_heads) {
  constexpr std::int64_t kLine = 16;  // floats
  const std::int64_t rows = (kChunk * key_dim + kLine - 1) / kLine * kLine;
  GatedDeltaWorkspace at{};
  at.k = 0;
  at.q = at.k + rows;
  at.k_transposed = at.q + rows;
  at.gram = at.k_transposed + kChunk * key_dim;
  at.scores = at.gram + kChunk * kChunk;
  at.system = at.scores + kChunk * kChunk;
  at.weights = at.system + kChunk * kChunk;
  at.decay = at.weights + kChunk * kChunk;
  at.updates = at.decay + 4 * kChunk;
  at.outputs = at.updates + kChunk * kStrip;
  at.state = at.outputs + kChunk * kStrip;
  at.size = at.state + num_heads * ((value_dim + kStrip - 1) / kStrip) * key_dim * kStrip;
  return at;
}

}  // namespace kvspan::cpu
