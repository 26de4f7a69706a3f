// How the rerope kernel is launched: layers that differ only in their pools go together, many moves
// at a time.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "block_copy_kernel.cuh"
#include "kvspan/check.h"
#include "rerope_kernel.cuh"

namespace kvspan::cuda {

// Long thread blocks fill fewer tables; this many, some ten times what a large GPU holds, keep it
// busy to the end.
constexpr std::int64_t kManyThreadBlocks = 8192;

inline bool is_aligned_for_vectors(const TensorView& tensor) {
  const std::int64_t size = tensor.dtype.size_bytes();
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % kVectorBytes != 0) return false;
  if (tensor.shape[3] * size % kVectorBytes != 0) return false;
  for (int i = 0; i < 3; ++i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] * size % kVectorBytes != 0) return false;
  }
  return true;
}

// Whether every access of 16 bytes is aligned and every row divides into them.
inline bool can_vectorize_rerope(const ReropeLayer& layer, std::int64_t rotary_offset) {
  const std::int64_t per_access = kVectorBytes / layer.k_src.dtype.size_bytes();
  const std::int64_t rotary_dim = 2 * static_cast<std::int64_t>(layer.inv_freq.size());
  const std::int64_t unit = layer.is_neox ? rotary_dim / 2 : rotary_dim;
  return unit % per_access == 0 && rotary_offset % per_access == 0 &&
         is_aligned_for_vectors(layer.k_src) && is_aligned_for_vectors(layer.k_dst);
}

// Values go with the keys in accesses of 16 bytes, or in launches of their own.
inline bool values_go_along(const ReropeLayer& layer, std::int64_t rotary_offset) {
  return layer.v_src.data && can_vectorize_rerope(layer, rotary_offset) &&
         is_aligned_for_vectors(layer.v_src) && is_aligned_for_vectors(layer.v_dst) &&
         (layer.k_src.data == layer.k_dst.data) == (layer.v_src.data == layer.v_dst.data);
}

inline bool same_geometry(const TensorView& a, const TensorView& b) {
  return a.dtype == b.dtype &&
         std::equal(a.shape.begin() + 1, a.shape.end(), b.shape.begin() + 1) &&
         a.strides == b.strides;
}

inline bool share_launch(const ReropeLayer& a, const ReropeLayer& b, std::int64_t rotary_offset) {
  const bool values = values_go_along(a, rotary_offset);
  return a.is_neox == b.is_neox && std::ranges::equal(a.inv_freq, b.inv_freq) &&
         same_geometry(a.k_src, b.k_src) && same_geometry(a.k_dst, b.k_dst) &&
         (a.k_src.data == a.k_dst.data) == (b.k_src.data == b.k_dst.data) &&
         can_vectorize_rerope(a, rotary_offset) == can_vectorize_rerope(b, rotary_offset) &&
         values == values_go_along(b, rotary_offset) &&
         (!values || (same_geometry(a.v_src, b.v_src) && same_geometry(a.v_dst, b.v_dst)));
}

// The parameters of a launch but for its layers and moves.
inline ReropeKernelArgs common_kernel_args(const ReropeArgs& args, const ReropeLayer& layer) {
  const TensorView& k_src = layer.k_src;
  const TensorView& k_dst = layer.k_dst;
  ReropeKernelArgs kernel_args{};
  kernel_args.src_block_stride = k_src.strides[0];
  kernel_args.src_token_stride = k_src.strides[1];
  kernel_args.src_head_stride = k_src.strides[2];
  kernel_args.dst_block_stride = k_dst.strides[0];
  kernel_args.dst_token_stride = k_dst.strides[1];
  kernel_args.dst_head_stride = k_dst.strides[2];
  kernel_args.num_rows = static_cast<std::uint32_t>(k_src.shape[1] * k_src.shape[2]);
  kernel_args.num_kv_heads = Divisor(k_src.shape[2]);
  kernel_args.head_dim = static_cast<std::uint32_t>(k_src.shape[3]);
  kernel_args.rotary_offset = static_cast<std::uint32_t>(args.rotary_offset);
  kernel_args.num_frequencies = static_cast<std::uint32_t>(layer.inv_freq.size());
  kernel_args.num_axes = static_cast<std::uint32_t>(args.num_axes);
  kernel_args.one_pool = k_src.data == k_dst.data;
  if (values_go_along(layer, args.rotary_offset)) {
    kernel_args.v_src_block_bytes = layer.v_src.strides[0] * layer.v_src.dtype.size_bytes();
    kernel_args.v_dst_block_bytes = layer.v_dst.strides[0] * layer.v_dst.dtype.size_bytes();
    kernel_args.v_layout = make_block_layout(layer.v_src, layer.v_dst);
    kernel_args.v_per_row = Divisor(kernel_args.v_layout.row_bytes / kVectorBytes);
    kernel_args.v_num_inner = Divisor(kernel_args.v_layout.num_inner);
    kernel_args.num_values = static_cast<std::uint32_t>(block_bytes(layer.v_src) / kVectorBytes);
  }
  std::copy(layer.inv_freq.begin(), layer.inv_freq.end(), kernel_args.inv_freq);
  std::copy(args.axes.begin(), args.axes.end(), kernel_args.axes);
  return kernel_args;
}

// layers: those of one launch, or of several if they are too many.
template <typename T, bool kIsNeox, bool kIsVector, typename Launch>
void launch_rerope_as(const ReropeArgs& args, std::span<const ReropeLayer> layers,
                      const Launch& launch) {
  using Access = ReropeAccess<T, kIsNeox, kIsVector>;
  const TensorView& k_src = layers[0].k_src;
  const std::int64_t value_bytes = layers[0].v_src.data ? block_bytes(layers[0].v_src) : 0;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  KVSPAN_CHECK_ARG((block_bytes(k_src) + value_bytes) * kLayersPerLaunch <= kMost,
                   "k_src: expected blocks of at most ", kMost / kLayersPerLaunch,
                   " bytes with their values, got ", block_bytes(k_src) + value_bytes);
  ReropeKernelArgs kernel_args = common_kernel_args(args, layers[0]);
  const std::int64_t num_rows = kernel_args.num_rows;
  const std::int64_t rotated = Access::rotated_per_row(kernel_args);
  const std::int64_t copied = Access::copied_per_row(kernel_args);
  const std::int64_t per_layer = num_rows * (rotated + copied) + kernel_args.num_values;
  kernel_args.rotated_per_row = Divisor(rotated);
  kernel_args.copied_per_row = Divisor(copied);
  kernel_args.per_layer[0] = Divisor(per_layer);
  kernel_args.per_layer[1] = Divisor(num_rows * rotated);
  const std::size_t num_moves = args.src_blocks.size();
  const auto num_axes = static_cast<std::size_t>(args.num_axes);
  for (std::size_t layer = 0; layer < layers.size(); layer += kLayersPerLaunch) {
    const std::size_t num_layers = std::min<std::size_t>(kLayersPerLaunch, layers.size() - layer);
    kernel_args.num_layers = static_cast<std::uint32_t>(num_layers);
    for (std::size_t i = 0; i < num_layers; ++i) {
      const ReropeLayer& from = layers[layer + i];
      kernel_args.pools[i] = {from.k_src.data, from.k_dst.data, from.v_src.as<const char>(),
                              from.v_dst.as<char>()};
    }
    const std::size_t per_launch = kReropeMovesPerLaunch / num_axes;
    for (std::size_t first = 0; first < num_moves; first += per_launch) {
      const std::size_t count = std::min(per_launch, num_moves - first);
      std::copy_n(args.src_blocks.begin() + first, count, kernel_args.src_blocks);
      std::copy_n(args.dst_blocks.begin() + first, count, kernel_args.dst_blocks);
      std::copy_n(args.deltas.begin() + first * num_axes, count * num_axes, kernel_args.deltas);
      const std::int64_t num_accesses = per_layer * static_cast<std::int64_t>(num_layers);
      unsigned slices = 0;
      for (const int per_thread :
           {4 * kAccessesPerThread, 2 * kAccessesPerThread, kAccessesPerThread}) {
        slices = num_slices(num_accesses, per_thread);
        if (static_cast<std::int64_t>(count) * slices >= kManyThreadBlocks) break;
      }
      launch(&rerope_kernel<T, kIsNeox, kIsVector>, static_cast<unsigned>(count), slices,
             kernel_args);
    }
  }
}

template <typename T, typename Launch>
void launch_rerope_layers(const ReropeArgs& args, std::span<const ReropeLayer> layers,
                          const Launch& launch) {
  const bool is_vector = can_vectorize_rerope(layers[0], args.rotary_offset);
  if (layers[0].is_neox) {
    is_vector ? launch_rerope_as<T, true, true>(args, layers, launch)
              : launch_rerope_as<T, true, false>(args, layers, launch);
  } else {
    is_vector ? launch_rerope_as<T, false, true>(args, layers, launch)
              : launch_rerope_as<T, false, false>(args, layers, launch);
  }
}

// Calls launch(kernel, grid_x, grid_y, kernel_args) for all moves; arguments are valid.
template <typename Launch>
void launch_rerope(const ReropeArgs& args, const Launch& launch) {
  for (const TensorView* pool : {&args.layers[0].k_src, &args.layers[0].k_dst}) {
    KVSPAN_CHECK_ARG(pool->shape[0] <= std::numeric_limits<std::int32_t>::max(),
                     "k_src: expected fewer than 2^31 blocks, got ", pool->shape[0]);
  }
  const auto copy = [&](const TensorView& src, const TensorView& dst) {
    BlockCopyArgs copy_args;
    copy_args.src = src;
    copy_args.dst = dst;
    copy_args.src_blocks = args.src_blocks;
    copy_args.dst_blocks = args.dst_blocks;
    launch_block_copy(copy_args, launch);
  };
  std::vector<ReropeLayer> left;
  for (const ReropeLayer& layer : args.layers) {
    if (layer.inv_freq.empty()) {
      copy(layer.k_src, layer.k_dst);
    } else {
      left.push_back(layer);
    }
    const bool goes_along = !layer.inv_freq.empty() && values_go_along(layer, args.rotary_offset);
    if (layer.v_src.data && !goes_along) copy(layer.v_src, layer.v_dst);
  }
  while (!left.empty()) {
    const ReropeLayer first = left.front();
    const auto end = std::stable_partition(left.begin(), left.end(), [&](const ReropeLayer& layer) {
      return share_launch(first, layer, args.rotary_offset);
    });
    const std::span<const ReropeLayer> layers(left.begin(), end);
    const DType dtype = layers[0].k_src.dtype;
    if (dtype == kFloat32) {
      launch_rerope_layers<float>(args, layers, launch);
    } else if (dtype == kBFloat16) {
      launch_rerope_layers<BFloat16>(args, layers, launch);
    } else if (dtype == kFloat16) {
      launch_rerope_layers<Float16>(args, layers, launch);
    } else if (dtype == kFloat8E4M3FN) {
      launch_rerope_layers<Float8E4M3>(args, layers, launch);
    } else {
      KVSPAN_ASSERT(dtype == kFloat8E5M2);
      launch_rerope_layers<Float8E5M2>(args, layers, launch);
    }
    left.erase(left.begin(), end);
  }
}

}  // namespace kvspan::cuda
