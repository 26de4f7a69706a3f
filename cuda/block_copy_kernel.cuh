// The block copy kernel and how it is launched; see kvspan/block_copy.h for what it does.
#pragma once

#include <algorithm>
#include <limits>

#include "block_layout.h"
#include "common.cuh"
#include "kvspan/block_copy.h"
#include "kvspan/check.h"

namespace kvspan::cuda {

constexpr int kCopyMovesPerLaunch = kLargeParameters ? 1024 : 192;

struct BlockCopyKernelArgs {
  const char* src;
  char* dst;
  std::int64_t src_block_bytes, dst_block_bytes;  // strides
  BlockLayout layout;
  std::uint32_t num_accesses;  // per block
  Divisor accesses_per_row, num_inner;
  std::int64_t src_blocks[kCopyMovesPerLaunch];
  std::int64_t dst_blocks[kCopyMovesPerLaunch];
};
static_assert(sizeof(BlockCopyKernelArgs) <= kMaxParameterBytes);

template <int kBytes>
__global__ void __launch_bounds__(kThreadsPerBlock)
    block_copy_kernel(const __grid_constant__ BlockCopyKernelArgs args) {
  using Access = Pack<unsigned char, kBytes, kBytes>;
  const char* src = args.src + args.src_blocks[blockIdx.x] * args.src_block_bytes;
  char* dst = args.dst + args.dst_blocks[blockIdx.x] * args.dst_block_bytes;
  for (std::uint32_t item = blockIdx.y * blockDim.x + threadIdx.x; item < args.num_accesses;
       item += gridDim.y * blockDim.x) {
    const std::uint32_t row = args.accesses_per_row.quotient(item);
    const std::int64_t byte = std::int64_t{args.accesses_per_row.remainder(item, row)} * kBytes;
    const std::uint32_t outer = args.num_inner.quotient(row);
    const std::uint32_t inner = args.num_inner.remainder(row, outer);
    *reinterpret_cast<Access*>(dst + outer * args.layout.dst_outer_bytes +
                               inner * args.layout.dst_inner_bytes + byte) =
        *reinterpret_cast<const Access*>(src + outer * args.layout.src_outer_bytes +
                                         inner * args.layout.src_inner_bytes + byte);
  }
}

// The widest access, of 16 bytes down to 1, that divides every address and row.
inline int copy_access_bytes(const BlockCopyKernelArgs& args) {
  const std::int64_t all = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(args.src)) |
                           static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(args.dst)) |
                           args.src_block_bytes | args.dst_block_bytes | args.layout.row_bytes |
                           args.layout.src_outer_bytes | args.layout.src_inner_bytes |
                           args.layout.dst_outer_bytes | args.layout.dst_inner_bytes;
  int bytes = kVectorBytes;
  while (all % bytes != 0) bytes /= 2;
  return bytes;
}

// Calls launch(kernel, grid_x, grid_y, kernel_args) for all moves; arguments are valid.
template <typename Launch>
void launch_block_copy(const BlockCopyArgs& args, const Launch& launch) {
  const std::int64_t size = args.src.dtype.size_bytes();
  BlockCopyKernelArgs kernel_args{};
  kernel_args.src = args.src.as<const char>();
  kernel_args.dst = args.dst.as<char>();
  kernel_args.src_block_bytes = args.src.strides[0] * size;
  kernel_args.dst_block_bytes = args.dst.strides[0] * size;
  kernel_args.layout = make_block_layout(args.src, args.dst);
  const int access_bytes = copy_access_bytes(kernel_args);
  const std::int64_t num_accesses = block_bytes(args.src) / access_bytes;
  KVSPAN_CHECK_ARG(num_accesses <= std::numeric_limits<std::int32_t>::max(),
                   "src: expected blocks of fewer than 2^31 accesses, got ",
                   shape_to_string(args.src));
  kernel_args.num_accesses = static_cast<std::uint32_t>(num_accesses);
  kernel_args.accesses_per_row = Divisor(kernel_args.layout.row_bytes / access_bytes);
  kernel_args.num_inner = Divisor(kernel_args.layout.num_inner);

  const auto kernel = [&]() -> void (*)(BlockCopyKernelArgs) {
    switch (access_bytes) {
      case 16:
        return &block_copy_kernel<16>;
      case 8:
        return &block_copy_kernel<8>;
      case 4:
        return &block_copy_kernel<4>;
      case 2:
        return &block_copy_kernel<2>;
      default:
        return &block_copy_kernel<1>;
    }
  }();
  const bool one_pool = args.src.data == args.dst.data;
  unsigned count = 0;
  for (std::size_t move = 0; move < args.src_blocks.size(); ++move) {
    // A block onto itself is there already.
    if (!one_pool || args.src_blocks[move] != args.dst_blocks[move]) {
      kernel_args.src_blocks[count] = args.src_blocks[move];
      kernel_args.dst_blocks[count++] = args.dst_blocks[move];
    }
    if (count == kCopyMovesPerLaunch || (count > 0 && move + 1 == args.src_blocks.size())) {
      launch(kernel, count, num_slices(num_accesses), kernel_args);
      count = 0;
    }
  }
}

}  // namespace kvspan::cuda
