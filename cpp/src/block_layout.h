// One block as rows of contiguous elements, in bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kvspan/tensor_view.h"

namespace kvspan {

// rows: outer x inner rows of row_bytes each; strides are those of source and destination.
struct BlockLayout {
  std::int64_t num_outer;
  std::int64_t num_inner;
  std::int64_t row_bytes;
  std::int64_t src_outer_bytes, src_inner_bytes;
  std::int64_t dst_outer_bytes, dst_inner_bytes;
};

// src and dst: [num_blocks, block_size, num_kv_heads, head_dim]. Dimensions are ordered by the
// destination's strides (an HND tensor is walked head by head) and merged where both tensors are
// contiguous, down to one row per block.
inline BlockLayout make_block_layout(const TensorView& src, const TensorView& dst) {
  const std::int64_t size = src.dtype.size_bytes();
  int outer = 1;
  int inner = 2;
  if (dst.strides[1] < dst.strides[2] || dst.shape[2] == 1) std::swap(outer, inner);
  BlockLayout layout{src.shape[outer],          src.shape[inner],
                     src.shape[3] * size,       src.strides[outer] * size,
                     src.strides[inner] * size, dst.strides[outer] * size,
                     dst.strides[inner] * size};
  for (int pass = 0; pass < 2; ++pass) {
    const bool mergeable = layout.num_inner == 1 || (layout.src_inner_bytes == layout.row_bytes &&
                                                     layout.dst_inner_bytes == layout.row_bytes);
    if (!mergeable) break;
    layout.row_bytes *= layout.num_inner;
    layout.num_inner = layout.num_outer;
    layout.src_inner_bytes = layout.src_outer_bytes;
    layout.dst_inner_bytes = layout.dst_outer_bytes;
    layout.num_outer = 1;
    layout.src_outer_bytes = layout.dst_outer_bytes = 0;
  }
  return layout;
}

// Copies one block; source and destination are equal (nothing to do) or do not overlap.
inline void copy_block(const BlockLayout& layout, const char* src, char* dst) {
  if (src == dst) return;
  for (std::int64_t i = 0; i < layout.num_outer; ++i) {
    for (std::int64_t j = 0; j < layout.num_inner; ++j) {
      std::memcpy(dst + i * layout.dst_outer_bytes + j * layout.dst_inner_bytes,
                  src + i * layout.src_outer_bytes + j * layout.src_inner_bytes,
                  static_cast<std::size_t>(layout.row_bytes));
    }
  }
}

// Of how many blocks to ask for pages at once: more than these would be forgotten again.
inline std::int64_t blocks_ahead(const BlockLayout& layout) {
  constexpr std::int64_t kBytes = 1 << 16, kMost = 8;
  const std::int64_t bytes = layout.num_outer * layout.num_inner * layout.row_bytes;
  return std::clamp(kBytes / std::max<std::int64_t>(bytes, 1), std::int64_t{1}, kMost);
}

// Asks for a line of each page of a block: a translation that misses holds up what comes after it,
// and many that miss together take hardly longer than one. Always inlined: GCC takes a function
// that does nothing else for one without effect, and drops its calls.
[[gnu::always_inline]] inline void prefetch_pages(const BlockLayout& layout, const char* block,
                                                  std::int64_t outer_bytes,
                                                  std::int64_t inner_bytes) {
  constexpr std::int64_t kPage = 4096;  // the least there is
  const std::int64_t step =
      std::max(kPage / std::max<std::int64_t>(inner_bytes, 1), std::int64_t{1});
  for (std::int64_t outer = 0; outer < layout.num_outer; ++outer) {
    for (std::int64_t inner = 0; inner < layout.num_inner; inner += step) {
      const char* row = block + outer * outer_bytes + inner * inner_bytes;
      for (std::int64_t byte = 0; byte < layout.row_bytes; byte += kPage) {
        __builtin_prefetch(row + byte);
      }
    }
  }
}

// Of a block to come, and of its destination.
[[gnu::always_inline]] inline void prefetch_pages(const BlockLayout& layout, const char* src,
                                                  const char* dst) {
  prefetch_pages(layout, src, layout.src_outer_bytes, layout.src_inner_bytes);
  if (src != dst) prefetch_pages(layout, dst, layout.dst_outer_bytes, layout.dst_inner_bytes);
}

inline char* block_data(const TensorView& tensor, std::int64_t block) {
  return tensor.as<char>() + block * tensor.strides[0] * tensor.dtype.size_bytes();
}

inline std::int64_t block_bytes(const TensorView& tensor) {
  return tensor.shape[1] * tensor.shape[2] * tensor.shape[3] * tensor.dtype.size_bytes();
}

}  // namespace kvspan
