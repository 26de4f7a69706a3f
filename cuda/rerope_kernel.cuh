// The rerope kernel and how it is launched; see kvspan/rerope.h for what it computes.
//
// One row of thread blocks per move. Each first fills a table of cosines and sines in shared memory
// (angles in double: a few dozen sincos per thread block, paid once for all tokens and heads), then
// strides over the block's rows in accesses of 16 bytes where alignment allows, single elements
// where not. Built with -fmad=false, so that results have the same bits as on the CPU.
#pragma once

#include <algorithm>
#include <limits>

#include "common.cuh"
#include "kvspan/check.h"
#include "kvspan/rerope.h"

namespace kvspan::cuda {

// 96 moves of 24 bytes and 256 frequencies leave room within 4 KB of kernel parameters.
constexpr int kReropeMovesPerLaunch = 96;

struct ReropeKernelArgs {
  const void* k_src;  // [num_src_blocks, block_size, num_kv_heads, head_dim]
  void* k_dst;        // [num_dst_blocks, block_size, num_kv_heads, head_dim]
  std::int64_t src_block_stride, src_token_stride, src_head_stride;  // elements
  std::int64_t dst_block_stride, dst_token_stride, dst_head_stride;
  std::uint32_t num_rows;  // block_size * num_kv_heads
  std::uint32_t num_kv_heads;
  std::uint32_t head_dim;
  std::uint32_t num_frequencies;  // rotary_dim / 2
  std::int64_t src_blocks[kReropeMovesPerLaunch];
  std::int64_t dst_blocks[kReropeMovesPerLaunch];
  std::int64_t deltas[kReropeMovesPerLaunch];
  float inv_freq[kMaxFrequencies];
};
static_assert(sizeof(ReropeKernelArgs) <= 4096, "kernel parameters are limited to 4 KB");

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

template <typename T, bool kIsNeox, bool kIsVector>
__global__ void __launch_bounds__(kThreadsPerBlock)
    rerope_kernel(const __grid_constant__ ReropeKernelArgs args) {
  using Access = ReropeAccess<T, kIsNeox, kIsVector>;
  using Rotated = typename Access::Rotated;
  using Copied = typename Access::Copied;
  constexpr int kSize = Access::kSize;
  __shared__ float cos_table[kMaxFrequencies];
  __shared__ float sin_table[kMaxFrequencies];

  const std::int64_t delta = args.deltas[blockIdx.x];
  const std::uint32_t half = args.num_frequencies;
  for (std::uint32_t i = threadIdx.x; i < half; i += blockDim.x) {
    double s, c;
    sincos(static_cast<double>(delta) * static_cast<double>(args.inv_freq[i]), &s, &c);
    cos_table[i] = static_cast<float>(c);
    sin_table[i] = static_cast<float>(s);
  }
  __syncthreads();

  const T* src =
      static_cast<const T*>(args.k_src) + args.src_blocks[blockIdx.x] * args.src_block_stride;
  T* dst = static_cast<T*>(args.k_dst) + args.dst_blocks[blockIdx.x] * args.dst_block_stride;
  const std::uint32_t num_rotated = Access::rotated_per_row(args);
  const std::uint32_t per_row = num_rotated + Access::copied_per_row(args);
  const std::uint32_t num_accesses = args.num_rows * per_row;
  for (std::uint32_t item = blockIdx.y * blockDim.x + threadIdx.x; item < num_accesses;
       item += gridDim.y * blockDim.x) {
    const std::uint32_t row = item / per_row;
    const std::uint32_t access = item % per_row;
    const std::int64_t token = row / args.num_kv_heads;
    const std::int64_t head = row % args.num_kv_heads;
    const T* src_row = src + token * args.src_token_stride + head * args.src_head_stride;
    T* dst_row = dst + token * args.dst_token_stride + head * args.dst_head_stride;
    if (access >= num_rotated) {
      const std::uint32_t first = 2 * half + (access - num_rotated) * Access::kCopySize;
      *reinterpret_cast<Copied*>(dst_row + first) =
          *reinterpret_cast<const Copied*>(src_row + first);
      continue;
    }
    const std::uint32_t first = access * kSize;
    if constexpr (kIsNeox) {
      Rotated x_1 = *reinterpret_cast<const Rotated*>(src_row + first);
      Rotated x_2 = *reinterpret_cast<const Rotated*>(src_row + half + first);
      if (delta != 0) {
        for (int i = 0; i < kSize; ++i) {
          const float c = cos_table[first + i], s = sin_table[first + i];
          const float a = to_float(x_1.values[i]), b = to_float(x_2.values[i]);
          x_1.values[i] = from_float<T>(a * c - b * s);
          x_2.values[i] = from_float<T>(b * c + a * s);
        }
      }
      *reinterpret_cast<Rotated*>(dst_row + first) = x_1;
      *reinterpret_cast<Rotated*>(dst_row + half + first) = x_2;
    } else {
      Rotated x = *reinterpret_cast<const Rotated*>(src_row + first);
      if (delta != 0) {
        for (int i = 0; i < kSize; i += 2) {
          const float c = cos_table[(first + i) / 2], s = sin_table[(first + i) / 2];
          const float a = to_float(x.values[i]), b = to_float(x.values[i + 1]);
          x.values[i] = from_float<T>(a * c - b * s);
          x.values[i + 1] = from_float<T>(b * c + a * s);
        }
      }
      *reinterpret_cast<Rotated*>(dst_row + first) = x;
    }
  }
}

// Whether every access of 16 bytes is aligned and every row divides into them.
inline bool can_vectorize_rerope(const ReropeArgs& args) {
  const std::int64_t size = args.k_src.dtype.size_bytes();
  const std::int64_t per_access = kVectorBytes / size;
  const std::int64_t rotary_dim = 2 * static_cast<std::int64_t>(args.inv_freq.size());
  const std::int64_t unit = args.is_neox ? rotary_dim / 2 : rotary_dim;
  if (unit % per_access != 0 || args.k_src.shape[3] % per_access != 0) return false;
  for (const TensorView* tensor : {&args.k_src, &args.k_dst}) {
    if (reinterpret_cast<std::uintptr_t>(tensor->data) % kVectorBytes != 0) return false;
    for (int i = 0; i < 3; ++i) {
      if (tensor->shape[i] > 1 && tensor->strides[i] % per_access != 0) return false;
    }
  }
  return true;
}

template <typename T, bool kIsNeox, bool kIsVector, typename Launch>
void launch_rerope_as(const ReropeArgs& args, const Launch& launch) {
  const TensorView& k_src = args.k_src;
  const TensorView& k_dst = args.k_dst;
  KVSPAN_CHECK_ARG(
      k_src.shape[1] * k_src.shape[2] * k_src.shape[3] <= std::numeric_limits<std::int32_t>::max(),
      "k_src: expected blocks of fewer than 2^31 elements, got ", shape_to_string(k_src));
  ReropeKernelArgs kernel_args{};
  kernel_args.k_src = k_src.data;
  kernel_args.k_dst = k_dst.data;
  kernel_args.src_block_stride = k_src.strides[0];
  kernel_args.src_token_stride = k_src.strides[1];
  kernel_args.src_head_stride = k_src.strides[2];
  kernel_args.dst_block_stride = k_dst.strides[0];
  kernel_args.dst_token_stride = k_dst.strides[1];
  kernel_args.dst_head_stride = k_dst.strides[2];
  kernel_args.num_rows = static_cast<std::uint32_t>(k_src.shape[1] * k_src.shape[2]);
  kernel_args.num_kv_heads = static_cast<std::uint32_t>(k_src.shape[2]);
  kernel_args.head_dim = static_cast<std::uint32_t>(k_src.shape[3]);
  kernel_args.num_frequencies = static_cast<std::uint32_t>(args.inv_freq.size());
  std::copy(args.inv_freq.begin(), args.inv_freq.end(), kernel_args.inv_freq);

  using Access = ReropeAccess<T, kIsNeox, kIsVector>;
  const std::int64_t num_accesses =
      std::int64_t{kernel_args.num_rows} *
      (Access::rotated_per_row(kernel_args) + Access::copied_per_row(kernel_args));
  for (std::size_t first = 0; first < args.deltas.size(); first += kReropeMovesPerLaunch) {
    const std::size_t count =
        std::min<std::size_t>(kReropeMovesPerLaunch, args.deltas.size() - first);
    std::copy_n(args.src_blocks.begin() + first, count, kernel_args.src_blocks);
    std::copy_n(args.dst_blocks.begin() + first, count, kernel_args.dst_blocks);
    std::copy_n(args.deltas.begin() + first, count, kernel_args.deltas);
    launch(&rerope_kernel<T, kIsNeox, kIsVector>, static_cast<unsigned>(count),
           num_slices(num_accesses), kernel_args);
  }
}

// Calls launch(kernel, grid_x, grid_y, kernel_args) for all moves; arguments are valid.
template <typename Launch>
void launch_rerope(const ReropeArgs& args, const Launch& launch) {
  const auto with_type = [&]<typename T>(T) {
    const bool is_vector = can_vectorize_rerope(args);
    if (args.is_neox) {
      is_vector ? launch_rerope_as<T, true, true>(args, launch)
                : launch_rerope_as<T, true, false>(args, launch);
    } else {
      is_vector ? launch_rerope_as<T, false, true>(args, launch)
                : launch_rerope_as<T, false, false>(args, launch);
    }
  };
  if (args.k_src.dtype == kFloat32) return with_type(float{});
  if (args.k_src.dtype == kBFloat16) return with_type(BFloat16{});
  KVSPAN_ASSERT(args.k_src.dtype == kFloat16);
  with_type(Float16{});
}

}  // namespace kvspan::cuda
