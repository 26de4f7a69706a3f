// The door of the tensor ops: validates once, then runs on the tensors' device.
#include <cmath>

#include "kvspan/block_copy.h"
#include "kvspan/block_moves.h"
#include "kvspan/check.h"
#include "kvspan/device.h"
#include "kvspan/rerope.h"

namespace kvspan {
namespace {

using Int64Span = std::span<const std::int64_t>;

bool is_empty(const TensorView& tensor) {
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 0) return true;
  }
  return false;
}

// Both tensors have the layout that every block op shares.
void check_block_tensors(const TensorView& src, const char* src_name, const TensorView& dst,
                         const char* dst_name) {
  KVSPAN_CHECK(src.dtype == dst.dtype, TypeError, dst_name, ": expected ", to_string(src.dtype),
               " like ", src_name, ", got ", to_string(dst.dtype));
  KVSPAN_CHECK_ARG(src.device.type != DeviceType::kOther, src_name,
                   ": expected a cpu or cuda tensor, got one on ", to_string(src.device));
  KVSPAN_CHECK_ARG(src.device == dst.device, dst_name, ": expected a tensor on ",
                   to_string(src.device), " like ", src_name, ", got ", to_string(dst.device));
  bool same_block = src.ndim == dst.ndim;
  for (int i = 1; i < src.ndim && same_block; ++i) same_block = src.shape[i] == dst.shape[i];
  KVSPAN_CHECK_ARG(same_block, dst_name, ": expected blocks of the same shape as ", src_name, " ",
                   shape_to_string(src), ", got ", shape_to_string(dst));
  const auto check_last_stride = [](const TensorView& t, const char* name) {
    const int last = t.ndim - 1;
    KVSPAN_CHECK_ARG(t.strides[last] == 1 || t.shape[last] <= 1, name,
                     ": expected a contiguous last dimension (stride 1), got stride ",
                     t.strides[last]);
  };
  check_last_stride(src, src_name);
  check_last_stride(dst, dst_name);
  KVSPAN_CHECK_ARG(!dst.read_only, dst_name, ": expected a writable tensor, got a read-only one");
  for (int i = 0; i < dst.ndim; ++i) {
    KVSPAN_CHECK_ARG(dst.strides[i] != 0 || dst.shape[i] <= 1 || is_empty(dst), dst_name,
                     ": expected distinct elements, got a dimension expanded from size 1 to ",
                     dst.shape[i]);
  }
}

void check_block_ids(Int64Span blocks, std::int64_t num_blocks, const char* name,
                     const char* tensor) {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    KVSPAN_CHECK_ARG(blocks[i] >= 0 && blocks[i] < num_blocks, name, "[", i,
                     "]: expected a block in [0, ", num_blocks, ") of ", tensor, ", got ",
                     blocks[i]);
  }
}

void check_moves(Int64Span src_blocks, Int64Span dst_blocks, const TensorView& src,
                 const char* src_name, const TensorView& dst, const char* dst_name) {
  KVSPAN_CHECK_ARG(dst_blocks.size() == src_blocks.size(), "dst_blocks: expected [",
                   src_blocks.size(), "] like src_blocks, got [", dst_blocks.size(), "]");
  check_block_ids(src_blocks, src.shape[0], "src_blocks", src_name);
  check_block_ids(dst_blocks, dst.shape[0], "dst_blocks", dst_name);
  check_independent_moves(src_blocks, dst_blocks, src.data == dst.data);
}

void check_num_threads(int num_threads) {
  KVSPAN_CHECK_ARG(num_threads >= 0, "num_threads: expected 0 (automatic) or more, got ",
                   num_threads);
}

// The same tensor with dimensions of size 1 put before the last, so that it has four.
TensorView to_4d(TensorView tensor) {
  for (; tensor.ndim < 4; ++tensor.ndim) {
    const int last = tensor.ndim - 1;
    tensor.shape[last + 1] = tensor.shape[last];
    tensor.strides[last + 1] = tensor.strides[last];
    tensor.shape[last] = 1;
    tensor.strides[last] = 0;
  }
  return tensor;
}

}  // namespace

void rerope(const ReropeArgs& args) {
  const TensorView& k_src = args.k_src;
  for (const auto& [tensor, name] : {std::pair{&k_src, "k_src"}, std::pair{&args.k_dst, "k_dst"}}) {
    KVSPAN_CHECK_ARG(tensor->ndim == 4, name,
                     ": expected shape [num_blocks, block_size, num_kv_heads, head_dim], got ",
                     shape_to_string(*tensor));
  }
  KVSPAN_CHECK(k_src.dtype == kFloat32 || k_src.dtype == kBFloat16 || k_src.dtype == kFloat16,
               TypeError, "k_src: expected float32, bfloat16 or float16, got ",
               to_string(k_src.dtype));
  check_block_tensors(k_src, "k_src", args.k_dst, "k_dst");
  check_moves(args.src_blocks, args.dst_blocks, k_src, "k_src", args.k_dst, "k_dst");
  KVSPAN_CHECK_ARG(args.deltas.size() == args.src_blocks.size(), "deltas: expected [",
                   args.src_blocks.size(), "] like src_blocks, got [", args.deltas.size(), "]");
  const std::int64_t head_dim = k_src.shape[3];
  const auto num_frequencies = static_cast<std::int64_t>(args.inv_freq.size());
  KVSPAN_CHECK_ARG(num_frequencies >= 1 && 2 * num_frequencies <= head_dim,
                   "inv_freq: expected 1 to head_dim / 2 = ", head_dim / 2, " frequencies, got ",
                   num_frequencies);
  for (std::int64_t i = 0; i < num_frequencies; ++i) {
    KVSPAN_CHECK_ARG(std::isfinite(args.inv_freq[i]), "inv_freq[", i,
                     "]: expected a finite number, got ", args.inv_freq[i]);
  }
  check_num_threads(args.num_threads);
  const VectorIsa isa = resolve_vector_isa(args.isa);

  if (k_src.device.type == DeviceType::kCuda) {
    require_cuda();
    KVSPAN_CHECK_ARG(num_frequencies <= cuda::kMaxFrequencies, "inv_freq: expected at most ",
                     cuda::kMaxFrequencies, " frequencies on cuda, got ", num_frequencies);
  }
  if (args.src_blocks.empty() || is_empty(k_src)) return;
  if (k_src.device.type == DeviceType::kCuda) {
    cuda::rerope(args);
  } else {
    ReropeArgs resolved = args;
    resolved.isa = isa;
    cpu::rerope(resolved);
  }
}

void copy_blocks(const BlockCopyArgs& args) {
  for (const auto& [tensor, name] : {std::pair{&args.src, "src"}, std::pair{&args.dst, "dst"}}) {
    KVSPAN_CHECK_ARG(tensor->ndim >= 2 && tensor->ndim <= 4, name,
                     ": expected shape [num_blocks, block_size, num_kv_heads, head_dim], with 2 "
                     "to 4 dimensions, got ",
                     shape_to_string(*tensor));
  }
  const int bits = args.src.dtype.bits;
  KVSPAN_CHECK(bits == 8 || bits == 16 || bits == 32 || bits == 64, TypeError,
               "src: expected a type of 1, 2, 4 or 8 bytes, got ", to_string(args.src.dtype));
  check_block_tensors(args.src, "src", args.dst, "dst");
  check_moves(args.src_blocks, args.dst_blocks, args.src, "src", args.dst, "dst");
  check_num_threads(args.num_threads);
  const bool on_cuda = args.src.device.type == DeviceType::kCuda;
  if (on_cuda) require_cuda();
  if (args.src_blocks.empty() || is_empty(args.src)) return;
  BlockCopyArgs normalized = args;
  normalized.src = to_4d(args.src);
  normalized.dst = to_4d(args.dst);
  on_cuda ? cuda::copy_blocks(normalized) : cpu::copy_blocks(normalized);
}

}  // namespace kvspan
