// The gated delta rule of hybrid models' linear attention (Gated DeltaNet, arXiv 2412.06464), for
// many sequences and heads at once.
//
// For each sequence and value head, token by token, from a state S of [key_dim, value_dim]:
//
//   S <- exp(g_t) S,   S <- S + k_t (beta_t (v_t - S^T k_t))^T,   out_t = scale S^T q_t
//
// with k and q divided by sqrt(|x|^2 + 1e-6) if qk_l2norm, as transformers' and
// flash-linear-attention's chunk_gated_delta_rule define it. Value head h uses key and query head
// h / (num_value_heads / num_key_heads).
//
// Work is done by chunks of kGatedDeltaChunk tokens, counted from each sequence's first token. With
// P_i = exp(g_0 + ... + g_i) and D_ij = exp(g_{j+1} + ... + g_i) within a chunk, the tokens'
// updates X solve a unit triangular system (the WY form), and products of matrices do the rest:
//
//   (I + tril(diag(beta) (K K^T * D), -1)) X = diag(beta) (V - diag(P) K S)
//   out = scale (diag(P) Q S + tril(Q K^T * D) X),    S <- P_last S + K^T diag(D_last) X
//
// Numerics: all in float, fused multiply-adds where the instruction set has them. Decays are
// products of the tokens' exp(g), never a quotient or a difference of sums: nothing overflows for
// g <= 0, and g = -infinity forgets everything. A float result is within about 1e-5 of the largest
// component of the exact one (1e-4 in the worst case found: 2000 nearly parallel keys, beta 2, no
// decay). CUDA multiplies matrices as tf32 (10 bits of mantissa) with float sums: about 1e-3 with
// inputs of 16 bits; for float inputs it adds the products of the bits that tf32 leaves.
// The bits depend on the instruction set, but not on threads, on other sequences, on later tokens,
// or on whether outputs are asked for; and a sequence cut at a multiple of kGatedDeltaChunk and
// continued from the state there gives the bits of the uncut one.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "kvspan/tensor_view.h"
#include "kvspan/vector_isa.h"

namespace kvspan {

inline constexpr std::int64_t kGatedDeltaChunk = 64;

// How a state's last two dimensions lie.
enum class StateLayout : std::uint8_t {
  kKeyValue,  // "kv": [key_dim, value_dim], as in transformers
  kValueKey,  // "vk": [value_dim, key_dim], as in vLLM on GPUs
};

// Throws ArgumentError on another name.
StateLayout parse_state_layout(std::string_view name);

// float32, bfloat16 or float16, one type for q, k, v and out; strides are free but for the last.
struct GatedDeltaArgs {
  TensorView q;  // [num_tokens, num_key_heads, key_dim], read; no data: only the state is computed
  TensorView k;  // [num_tokens, num_key_heads, key_dim], read
  TensorView v;  // [num_tokens, num_value_heads, value_dim], read
  TensorView g;  // [num_tokens, num_value_heads] float32, log decay, read
  TensorView beta;           // [num_tokens, num_value_heads] float32, read
  TensorView initial_state;  // [num_sequences, num_value_heads, ...] float32, read; no data: zero
  TensorView out;            // [num_tokens, num_value_heads, value_dim], written if there is a q
  // [num_sequences, num_value_heads, ...] float32, written; may be initial_state itself. A sequence
  // without tokens keeps its initial state.
  TensorView final_state;
  // [num_sequences + 1] first token of each sequence, and the end; host memory on every device.
  std::span<const std::int64_t> cu_seqlens;
  StateLayout state_layout = StateLayout::kKeyValue;
  bool qk_l2norm = true;
  float scale = 1.0f;

  int num_threads = 0;               // CPU: 0 chooses by the size of the work
  VectorIsa isa = VectorIsa::kAuto;  // CPU
  void* stream = nullptr;            // CUDA: a cudaStream_t
};

// Validates and runs on the tensors' device. CUDA work is only enqueued on the stream.
// Throws ArgumentError, TypeError, DeviceError.
void gated_delta(const GatedDeltaArgs& args);

// The implementations; they assume valid arguments.
namespace cpu {
void gated_delta(const GatedDeltaArgs& args);
}
namespace cuda {
inline constexpr std::int64_t kMaxKeyDim = 128;
void gated_delta(const GatedDeltaArgs& args);
}  // namespace cuda

}  // namespace kvspan
