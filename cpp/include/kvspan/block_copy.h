// Copies whole KV blocks, bit for bit: values, or keys that keep their position.
#pragma once

#include <cstdint>
#include <span>

#include "kvspan/tensor_view.h"

namespace kvspan {

struct BlockCopyArgs {
  // Any type of 1, 2, 4 or 8 bytes; the last dimension is contiguous, other strides are free; 2 to
  // 4 dimensions, equal but for the number of blocks. Source and destination are one view of the
  // same memory, or do not overlap.
  TensorView src;  // [num_src_blocks, block_size, num_kv_heads, head_dim], read
  TensorView dst;  // [num_dst_blocks, block_size, num_kv_heads, head_dim], written

  // As in ReropeArgs.
  std::span<const std::int64_t> src_blocks;  // [num_moves]
  std::span<const std::int64_t> dst_blocks;  // [num_moves]

  int num_threads = 0;     // CPU: 0 chooses by the size of the work
  void* stream = nullptr;  // CUDA: a cudaStream_t
};

// Validates and runs on the tensors' device. CUDA work is only enqueued on the stream.
// Throws ArgumentError, TypeError, DeviceError.
void copy_blocks(const BlockCopyArgs& args);

// The implementations; they assume valid arguments with tensors of exactly 4 dimensions.
namespace cpu {
void copy_blocks(const BlockCopyArgs& args);
}
namespace cuda {
void copy_blocks(const BlockCopyArgs& args);
}

}  // namespace kvspan
