// Moves whole blocks of cached keys to other positions: copy and rotate in one pass (ReRoPE).
//
// A key at position p holds R(p) k, and R(p + delta) k = R(delta) R(p) k, so a cached key is moved
// by rotating it by the delta alone (Span Queries, arXiv 2511.02749). Rotary dimension pairs are
// (i, i + rotary_dim / 2) for NeoX and (2i, 2i + 1) for interleaved (GPT-J) models:
//
//   out_1 = x_1 cos(a_i) - x_2 sin(a_i),   out_2 = x_2 cos(a_i) + x_1 sin(a_i),
//   a_i = delta * inv_freq[i]
//
// Numerics: the angle and its cosine and sine are taken in double and rounded to float once; the
// products and the sum are separate float operations (no fused multiply-add), so that every
// instruction set and CUDA give the same bits; the result is rounded to the storage type once, to
// nearest even. NaN and infinity pass through. Error of a component, for any delta whose angles a
// double holds: at most 2^-23 (|x_1| + |x_2|) plus half a unit in the last place of the storage
// type. Dimensions from rotary_dim on are copied bit for bit; a delta of 0 is an exact copy.
//
// Scaling that changes inv_freq (linear, Llama-3, YaRN) is the caller's: pass the model's own
// frequencies. YaRN's attention factor scales the key once and so needs nothing here.
#pragma once

#include <cstdint>
#include <span>

#include "kvspan/tensor_view.h"
#include "kvspan/vector_isa.h"

namespace kvspan {

struct ReropeArgs {
  // float32, bfloat16 or float16; block, token and head strides are free, head_dim is contiguous.
  // Source and destination are one view of the same memory, or do not overlap.
  TensorView k_src;  // [num_src_blocks, block_size, num_kv_heads, head_dim], read
  TensorView k_dst;  // [num_dst_blocks, block_size, num_kv_heads, head_dim], written

  // The moves, in host memory on every device. They run in any order: destinations are distinct,
  // and within one tensor no block is read by one move and written by another (see plan_moves).
  std::span<const std::int64_t> src_blocks;  // [num_moves]
  std::span<const std::int64_t> dst_blocks;  // [num_moves]
  std::span<const std::int64_t> deltas;      // [num_moves], tokens: placement - canonical position

  std::span<const float> inv_freq;  // [rotary_dim / 2], host memory, radians per token
  bool is_neox = true;

  int num_threads = 0;               // CPU: 0 chooses by the size of the work
  VectorIsa isa = VectorIsa::kAuto;  // CPU
  void* stream = nullptr;            // CUDA: a cudaStream_t
};

// Validates and runs on the tensors' device. CUDA work is only enqueued on the stream.
// Throws ArgumentError, TypeError, DeviceError.
void rerope(const ReropeArgs& args);

// The implementations; they assume valid arguments.
namespace cpu {
void rerope(const ReropeArgs& args);
}
namespace cuda {
// At most this many frequencies travel with a launch, as kernel parameters.
inline constexpr int kMaxFrequencies = 256;
void rerope(const ReropeArgs& args);
}  // namespace cuda

}  // namespace kvspan
