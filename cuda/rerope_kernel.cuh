// The rerope kernel; see kvspan/rerope.h for what it computes and rerope_launch.cuh for how it is
// launched.
//
// One launch moves the blocks of many layers. One row of thread blocks per move: each first fills a
// table of cosines and sines in shared memory (angles in double: a few dozen sincos per thread
// block, paid once for all its layers, tokens and heads), then strides over the moves' accesses of
// all layers, of 16 bytes where alignment allows, of single elements where not. Built with
// -fmad=false, so that results have the same bits as on the CPU.
#pragma once

#include "block_layout.h"
#include "common.cuh"
#include "kvspan/rerope.h"

namespace kvspan::cuda {

// What fits, with the rest, into kernel parameters.
constexpr int kLayersPerLaunch = kLargeParameters ? 80 : 20;
constexpr int kReropeMovesPerLaunch = kLargeParameters ? 1024 : 96;  // by the number of axes

struct ReropePools {
  const void* k_src;  // [num_src_blocks, block_size, num_kv_heads, head_dim]
  void* k_dst;        // [num_dst_blocks, block_size, num_kv_heads, head_dim]
  const char* v_src;
  char* v_dst;
};

// The layers of a launch have all of this in common but their pools.
struct ReropeKernelArgs {
  std::int64_t src_block_stride, src_token_stride, src_head_stride;  // elements
  std::int64_t dst_block_stride, dst_token_stride, dst_head_stride;
  std::int64_t v_src_block_bytes, v_dst_block_bytes;  // strides
  BlockLayout v_layout;
  std::uint32_t num_layers;
  std::uint32_t num_rows;  // block_size * num_kv_heads
  std::uint32_t head_dim;
  std::uint32_t rotary_offset;
  std::uint32_t num_frequencies;  // rotary_dim / 2
  std::uint32_t num_axes;
  std::uint32_t num_values;  // accesses of 16 bytes per layer; 0: values are not moved
  Divisor per_layer[2];      // accesses: of a move to another block, of one in place
  Divisor rotated_per_row, copied_per_row;  // accesses
  Divisor num_kv_heads;
  Divisor v_per_row, v_num_inner;
  bool one_pool;  // source and destination are the same tensors

  ReropePools pools[kLayersPerLaunch];
  std::uint32_t src_blocks[kReropeMovesPerLaunch];
  std::uint32_t dst_blocks[kReropeMovesPerLaunch];
  std::int64_t deltas[kReropeMovesPerLaunch];  // [num_moves, num_axes]
  float inv_freq[kMaxFrequencies];
  std::uint8_t axes[kMaxFrequencies];
};
static_assert(sizeof(ReropeKernelArgs) <= kMaxParameterBytes);

// kIsVector: accesses of 16 bytes; else of one element (one pair if interleaved).
template <typename T, bool kIsNeox, bool kIsVector>
struct ReropeAccess {
  static constexpr int kSize =
      kIsVector ? kVectorBytes / static_cast<int>(sizeof(T)) : (kIsNeox ? 1 : 2);
  static constexpr int kCopySize = kIsVector ? kSize : 1;
  using Rotated = Pack<T, kSize, kIsVector ? kVectorBytes : alignof(T)>;
  using Copied = Pack<T, kCopySize, kIsVector ? kVectorBytes : alignof(T)>;

  __host__ __device__ static std::uint32_t rotated_per_row(const ReropeKernelArgs& args) {
    return args.num_frequencies * (kIsNeox ? 1 : 2) / kSize;
  }
  __host__ __device__ static std::uint32_t copied_per_row(const ReropeKernelArgs& args) {
    return (args.head_dim - 2 * args.num_frequencies) / kCopySize;
  }
};

// Rotates one access of a row (of both halves if NeoX); dimension 0 is the first rotated one.
template <typename T, bool kIsNeox, bool kIsVector>
__device__ inline void rotate_access(const T* src_row, T* dst_row, std::uint32_t first,
                                     std::uint32_t half, bool rotates, const float* cos_table,
                                     const float* sin_table) {
  using Access = ReropeAccess<T, kIsNeox, kIsVector>;
  using Rotated = typename Access::Rotated;
  if constexpr (kIsNeox) {
    constexpr int kCount = Access::kSize == 1 ? 1 : 2;
    Rotated x_1 = *reinterpret_cast<const Rotated*>(src_row + first);
    Rotated x_2 = *reinterpret_cast<const Rotated*>(src_row + half + first);
    if (rotates) {
      KVSPAN_UNROLL
      for (int i = 0; i < Access::kSize; i += kCount) {
        float a[kCount], b[kCount], out_1[kCount], out_2[kCount];
        to_floats<kCount>(x_1.values + i, a);
        to_floats<kCount>(x_2.values + i, b);
        for (int j = 0; j < kCount; ++j) {
          const float c = cos_table[first + i + j], s = sin_table[first + i + j];
          out_1[j] = a[j] * c - b[j] * s;
          out_2[j] = b[j] * c + a[j] * s;
        }
        from_floats<kCount>(out_1, x_1.values + i);
        from_floats<kCount>(out_2, x_2.values + i);
      }
    }
    *reinterpret_cast<Rotated*>(dst_row + first) = x_1;
    *reinterpret_cast<Rotated*>(dst_row + half + first) = x_2;
  } else {
    Rotated x = *reinterpret_cast<const Rotated*>(src_row + first);
    if (rotates) {
      KVSPAN_UNROLL
      for (int i = 0; i < Access::kSize; i += 2) {
        const float c = cos_table[(first + i) / 2], s = sin_table[(first + i) / 2];
        float pair[2];
        to_floats<2>(x.values + i, pair);
        const float out[2] = {pair[0] * c - pair[1] * s, pair[1] * c + pair[0] * s};
        from_floats<2>(out, x.values + i);
      }
    }
    *reinterpret_cast<Rotated*>(dst_row + first) = x;
  }
}

template <typename T, bool kIsNeox, bool kIsVector>
__global__ void __launch_bounds__(kThreadsPerBlock)
    rerope_kernel(const __grid_constant__ ReropeKernelArgs args) {
  using Access = ReropeAccess<T, kIsNeox, kIsVector>;
  using Copied = typename Access::Copied;
  __shared__ float cos_table[kMaxFrequencies];
  __shared__ float sin_table[kMaxFrequencies];

  const std::int64_t* deltas = args.deltas + blockIdx.x * args.num_axes;
  bool rotates = false;
  for (std::uint32_t axis = 0; axis < args.num_axes; ++axis) rotates |= deltas[axis] != 0;
  for (std::uint32_t i = threadIdx.x; i < args.num_frequencies; i += blockDim.x) {
    double s, c;
    sincos(static_cast<double>(deltas[args.axes[i]]) * static_cast<double>(args.inv_freq[i]), &s,
           &c);
    cos_table[i] = static_cast<float>(c);
    sin_table[i] = static_cast<float>(s);
  }
  __syncthreads();

  const std::int64_t src_block = args.src_blocks[blockIdx.x];
  const std::int64_t dst_block = args.dst_blocks[blockIdx.x];
  // Rotated accesses come first, then copied ones, then values; in place, only the first.
  const bool in_place = args.one_pool && src_block == dst_block;
  const std::uint32_t num_rotated = args.num_rows * Access::rotated_per_row(args);
  const std::uint32_t num_keys =
      num_rotated + (in_place ? 0 : args.num_rows * Access::copied_per_row(args));
  const Divisor per_layer = args.per_layer[in_place ? 1 : 0];
  const std::int64_t k_src_block = src_block * args.src_block_stride;
  const std::int64_t k_dst_block = dst_block * args.dst_block_stride;
  const std::uint32_t num_accesses =
      (num_keys + (in_place ? 0 : args.num_values)) * args.num_layers;
  for (std::uint32_t item = blockIdx.y * blockDim.x + threadIdx.x; item < num_accesses;
       item += gridDim.y * blockDim.x) {
    const std::uint32_t layer = per_layer.quotient(item);
    const std::uint32_t access = per_layer.remainder(item, layer);
    const ReropePools& pools = args.pools[layer];
    if (access >= num_keys) {
      using Value = Pack<unsigned char, kVectorBytes, kVectorBytes>;
      const std::uint32_t value = access - num_keys;
      const std::uint32_t row = args.v_per_row.quotient(value);
      const std::int64_t byte = std::int64_t{args.v_per_row.remainder(value, row)} * kVectorBytes;
      const std::uint32_t outer = args.v_num_inner.quotient(row);
      const std::uint32_t inner = args.v_num_inner.remainder(row, outer);
      *reinterpret_cast<Value*>(pools.v_dst + dst_block * args.v_dst_block_bytes +
                                outer * args.v_layout.dst_outer_bytes +
                                inner * args.v_layout.dst_inner_bytes + byte) =
          *reinterpret_cast<const Value*>(pools.v_src + src_block * args.v_src_block_bytes +
                                          outer * args.v_layout.src_outer_bytes +
                                          inner * args.v_layout.src_inner_bytes + byte);
      continue;
    }
    const bool is_rotated = access < num_rotated;
    const std::uint32_t in_part = is_rotated ? access : access - num_rotated;
    const Divisor per_row = is_rotated ? args.rotated_per_row : args.copied_per_row;
    const std::uint32_t row = per_row.quotient(in_part);
    const std::uint32_t in_row = per_row.remainder(in_part, row);
    const std::uint32_t token = args.num_kv_heads.quotient(row);
    const std::uint32_t head = args.num_kv_heads.remainder(row, token);
    const T* src_row = static_cast<const T*>(pools.k_src) + k_src_block +
                       token * args.src_token_stride + head * args.src_head_stride;
    T* dst_row = static_cast<T*>(pools.k_dst) + k_dst_block + token * args.dst_token_stride +
                 head * args.dst_head_stride;
    if (is_rotated) {
      rotate_access<T, kIsNeox, kIsVector>(src_row + args.rotary_offset,
                                           dst_row + args.rotary_offset, in_row * Access::kSize,
                                           args.num_frequencies, rotates, cos_table, sin_table);
    } else {
      std::uint32_t first = in_row * Access::kCopySize;
      if (first >= args.rotary_offset) first += 2 * args.num_frequencies;
      *reinterpret_cast<Copied*>(dst_row + first) =
          *reinterpret_cast<const Copied*>(src_row + first);
    }
  }
}

}  // namespace kvspan::cuda
