// Moves whole blocks of cached keys to other positions: copy and rotate in one pass (ReRoPE), the
// values copied beside them, all layers in one call.
//
// A key at position p holds R(p) k, and R(p + delta) k = R(delta) R(p) k, so a cached key is moved
// by rotating it by the delta alone (Span Queries, arXiv 2511.02749). Rotary dimension pairs are
// (i, i + rotary_dim / 2) for NeoX and (2i, 2i + 1) for interleaved (GPT-J) models:
//
//   out_1 = x_1 cos(a_i) - x_2 sin(a_i),   out_2 = x_2 cos(a_i) + x_1 sin(a_i),
//   a_i = delta * inv_freq[i]
//
// With several position axes (M-RoPE), a_i = delta[axes[i]] * inv_freq[i].
//
// Numerics: the angle and its cosine and sine are taken in double and rounded to float once; the
// products and the sum are separate float operations (no fused multiply-add), so that every
// instruction set and CUDA give the same bits; the result is rounded to the storage type once, to
// nearest even. NaN and infinity pass through. Error of a component, for any delta whose angles a
// double holds: at most 2^-23 (|x_1| + |x_2|) plus half a unit in the last place of the storage
// type. Dimensions outside the rotated ones are copied bit for bit; a move whose deltas are all 0
// is an exact copy.
//
// 8-bit floats: x = scale * q with one scale per tensor or per head, the same in both pools. It
// multiplies both components of a pair, so dequantising, rotating and quantising again is rotating
// q itself, and no scale is asked for. A rotation keeps a pair's length, but one component can grow
// by sqrt(2), past the largest number m of the type (e4m3fn 448, e5m2 57344): it is then cut to
// +-m. Where every pair of q is no longer than m, as with scales that leave a factor sqrt(2) of
// room, nothing is cut. Rounding is at most u |q| + d per component and move (e4m3fn: u = 2^-4,
// d = 2^-10; e5m2: u = 2^-3, d = 2^-17), so after n moves a pair is off its exact place by at most
// ((1 + u)^n - 1) (|pair| + sqrt(2) d / u); normally distributed keys measured 0.37 u sqrt(n) of
// their norm. Move from pristine blocks where that counts: n = 1.
//
// Scaling that changes inv_freq (linear, Llama-3, YaRN) is the caller's: pass the model's own
// frequencies. YaRN's attention factor scales the key once and so needs nothing here.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "kvspan/tensor_view.h"
#include "kvspan/vector_isa.h"

namespace kvspan {

// How a block holds keys and values.
enum class KvLayout : std::uint8_t {
  // A contiguous row per token and head: [num_blocks, block_size, num_kv_heads, head_dim], strides
  // free but for the last. HND pools are permuted views. A fused row of a key and its value is one
  // tensor of key and value dimensions together (the value's are outside the rotated ones).
  kTokenRows,
  // vLLM's CPU attention, packed: [num_blocks, num_kv_heads, block_size, 2 * head_dim], where the
  // last two dimensions are contiguous and hold first the head's keys, then its values, of token t:
  //   kCpuVec  (its "vec" and "vec16"; all types)
  //     key d at d * block_size + t, value d at t * head_dim + d
  //   kCpuAmx  (its "amx"; bfloat16)
  //     key d at t / 16 * 16 * head_dim + d / 2 * 32 + t % 16 * 2 + d % 2,
  //     value d at d / 16 * 16 * block_size + t / 2 * 32 + d % 16 * 2 + t % 2
  // CPU only. Values come along in k_src; there is no v_src.
  kCpuVec,
  kCpuAmx,
};

// "token_rows", "cpu_vec", "cpu_amx"; parsing throws ArgumentError on another name.
const char* to_string(KvLayout layout);
KvLayout parse_kv_layout(std::string_view name);

// One layer's pools. Source and destination are one view of the same memory, or do not overlap.
struct ReropeLayer {
  // float32, bfloat16, float16, float8_e4m3fn or float8_e5m2; KvLayout says which shape.
  TensorView k_src;  // [num_src_blocks, block_size, num_kv_heads, head_dim], read
  TensorView k_dst;  // [num_dst_blocks, block_size, num_kv_heads, head_dim], written
  // Copied bit for bit; of any type of 1, 2, 4 or 8 bytes. Without data, values are not moved.
  TensorView v_src;  // [num_src_blocks, block_size, num_kv_heads, value_dim], read
  TensorView v_dst;  // [num_dst_blocks, block_size, num_kv_heads, value_dim], written
  // [rotary_dim / 2], host memory, radians per token. None at all: keys do not rotate either.
  std::span<const float> inv_freq;
  bool is_neox = true;
};

struct ReropeArgs {
  std::span<const ReropeLayer> layers;  // all on one device
  KvLayout layout = KvLayout::kTokenRows;

  // The moves, in host memory on every device, the same in every layer. They run in any order:
  // destinations are distinct, and within one tensor no block is read by one move and written by
  // another (see plan_moves).
  std::span<const std::int64_t> src_blocks;  // [num_moves]
  std::span<const std::int64_t> dst_blocks;  // [num_moves]
  std::span<const std::int64_t> deltas;      // [num_moves, num_axes], tokens: placement - canonical
  int num_axes = 1;
  // [rotary_dim / 2], the position axis of each frequency, of all layers. None at all: axis 0.
  std::span<const std::int64_t> axes;
  // The first rotated dimension: 0, or where the rotary slice of an MLA row starts.
  std::int64_t rotary_offset = 0;

  int num_threads = 0;               // CPU: 0 chooses by the size of the work
  VectorIsa isa = VectorIsa::kAuto;  // CPU
  void* stream = nullptr;            // CUDA: a cudaStream_t
};

inline constexpr int kMaxAxes = 4;

// Validates and runs on the tensors' device. CUDA work is only enqueued on the stream.
// Throws ArgumentError, TypeError, DeviceError.
void rerope(const ReropeArgs& args);

// The implementations; they assume valid arguments, tensors of exactly 4 dimensions and at least
// one move.
namespace cpu {
void rerope(const ReropeArgs& args);
}
namespace cuda {
// At most this many frequencies travel with a launch, as kernel parameters.
inline constexpr int kMaxFrequencies = 256;
void rerope(const ReropeArgs& args);
}  // namespace cuda

}  // namespace kvspan
