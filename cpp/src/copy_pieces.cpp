#include <algorithm>
#include <array>

#include "kvspan/check.h"
#include "kvspan/copy_queue.h"

namespace kvspan {
namespace {

struct Dimension {
  std::int64_t size;
  std::int64_t stride_bytes;
};

// The dimensions from `first` on that have more than one element, longest stride first, and the
// bytes of the run that the last of them make up, those taken out.
struct Runs {
  std::array<Dimension, kMaxDims> dimensions;
  int num_dimensions = 0;
  std::int64_t run_bytes;
  bool is_empty = false;

  Runs(const TensorView& tensor, int first) : run_bytes(tensor.dtype.size_bytes()) {
    for (int i = first; i < tensor.ndim; ++i) {
      is_empty = is_empty || tensor.shape[i] == 0;
      if (tensor.shape[i] == 1) continue;
      dimensions[num_dimensions++] = {tensor.shape[i],
                                      tensor.strides[i] * tensor.dtype.size_bytes()};
    }
    std::stable_sort(dimensions.begin(), dimensions.begin() + num_dimensions,
                     [](const Dimension& a, const Dimension& b) {
                       return std::abs(a.stride_bytes) > std::abs(b.stride_bytes);
                     });
    while (num_dimensions > 0 && dimensions[num_dimensions - 1].stride_bytes == run_bytes) {
      run_bytes *= dimensions[--num_dimensions].size;
    }
  }
};

void append(char* data, const Runs& runs, std::vector<CopyPiece>& pieces) {
  if (runs.is_empty) return;
  std::array<std::int64_t, kMaxDims> at{};
  while (true) {
    char* run = data;
    for (int i = 0; i < runs.num_dimensions; ++i) run += at[i] * runs.dimensions[i].stride_bytes;
    if (!pieces.empty() && pieces.back().data + pieces.back().bytes == run) {
      pieces.back().bytes += runs.run_bytes;
    } else {
      pieces.push_back({run, runs.run_bytes});
    }
    int i = runs.num_dimensions - 1;
    while (i >= 0 && ++at[i] == runs.dimensions[i].size) at[i--] = 0;
    if (i < 0) return;
  }
}

}  // namespace

void append_pieces(const TensorView& tensor, std::vector<CopyPiece>& pieces) {
  append(tensor.as<char>(), Runs(tensor, 0), pieces);
}

void append_block_pieces(const TensorView& pool, const ArgName& name,
                         std::span<const std::int64_t> blocks, std::vector<CopyPiece>& pieces) {
  KVSPAN_CHECK_ARG(pool.ndim >= 1, name, ": expected shape [num_blocks, ...], got ",
                   shape_to_string(pool));
  const Runs runs(pool, 1);
  for (const std::int64_t block : blocks) {
    KVSPAN_CHECK_ARG(block >= 0 && block < pool.shape[0], name, ": expected blocks in [0, ",
                     pool.shape[0], "), got ", block);
    append(pool.as<char>() + block * pool.strides[0] * pool.dtype.size_bytes(), runs, pieces);
  }
}

std::vector<CopySegment> pair_pieces(std::span<const CopyPiece> src,
                                     std::span<const CopyPiece> dst) {
  std::int64_t src_bytes = 0, dst_bytes = 0;
  for (const CopyPiece& piece : src) src_bytes += piece.bytes;
  for (const CopyPiece& piece : dst) dst_bytes += piece.bytes;
  KVSPAN_CHECK_ARG(src_bytes == dst_bytes, "dst: expected ", src_bytes, " bytes like src, got ",
                   dst_bytes);
  std::vector<CopySegment> segments;
  std::size_t s = 0, d = 0;
  std::int64_t s_at = 0, d_at = 0;
  while (s < src.size() && d < dst.size()) {
    const std::int64_t bytes = std::min(src[s].bytes - s_at, dst[d].bytes - d_at);
    if (bytes > 0) segments.push_back({src[s].data + s_at, dst[d].data + d_at, bytes});
    if ((s_at += bytes) == src[s].bytes) ++s, s_at = 0;
    if ((d_at += bytes) == dst[d].bytes) ++d, d_at = 0;
  }
  return segments;
}

}  // namespace kvspan
