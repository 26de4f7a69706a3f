// The door of the tensor ops: validates once, then runs on the tensors' device.
#include <cmath>
#include <vector>

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
void check_block_tensors(const TensorView& src, const ArgName& src_name, const TensorView& dst,
                         const ArgName& dst_name) {
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
  const auto check_last_stride = [](const TensorView& t, const ArgName& name) {
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
                     const ArgName& tensor) {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    KVSPAN_CHECK_ARG(blocks[i] >= 0 && blocks[i] < num_blocks, name, "[", i,
                     "]: expected a block in [0, ", num_blocks, ") of ", tensor, ", got ",
                     blocks[i]);
  }
}

// same_tensor: source and destination are one pool.
void check_moves(Int64Span src_blocks, Int64Span dst_blocks, const TensorView& src,
                 const ArgName& src_name, const TensorView& dst, const ArgName& dst_name,
                 bool same_tensor) {
  KVSPAN_CHECK_ARG(dst_blocks.size() == src_blocks.size(), "dst_blocks: expected [",
                   src_blocks.size(), "] like src_blocks, got [", dst_blocks.size(), "]");
  check_block_ids(src_blocks, src.shape[0], "src_blocks", src_name);
  check_block_ids(dst_blocks, dst.shape[0], "dst_blocks", dst_name);
  check_independent_moves(src_blocks, dst_blocks, same_tensor);
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

// Tensors that are copied bit for bit.
void check_copied(const TensorView& src, const ArgName& src_name, const TensorView& dst,
                  const ArgName& dst_name) {
  for (const auto& [tensor, name] : {std::pair{&src, &src_name}, std::pair{&dst, &dst_name}}) {
    KVSPAN_CHECK_ARG(tensor->ndim >= 2 && tensor->ndim <= 4, *name,
                     ": expected shape [num_blocks, block_size, num_kv_heads, head_dim], with 2 "
                     "to 4 dimensions, got ",
                     shape_to_string(*tensor));
  }
  const int bits = src.dtype.bits;
  KVSPAN_CHECK(bits == 8 || bits == 16 || bits == 32 || bits == 64, TypeError, src_name,
               ": expected a type of 1, 2, 4 or 8 bytes, got ", to_string(src.dtype));
  check_block_tensors(src, src_name, dst, dst_name);
}

void check_same_num_blocks(const TensorView& tensor, const ArgName& name, const TensorView& like,
                           const ArgName& like_name) {
  KVSPAN_CHECK_ARG(tensor.shape[0] == like.shape[0], name, ": expected ", like.shape[0],
                   " blocks like ", like_name, ", got ", tensor.shape[0]);
}

void check_keys(const TensorView& keys, const ArgName& name, KvLayout layout) {
  KVSPAN_CHECK(keys.dtype == kFloat32 || keys.dtype == kBFloat16 || keys.dtype == kFloat16 ||
                   keys.dtype == kFloat8E4M3FN || keys.dtype == kFloat8E5M2,
               TypeError, name,
               ": expected float32, bfloat16, float16, float8_e4m3fn or float8_e5m2, got ",
               to_string(keys.dtype));
  if (layout == KvLayout::kTokenRows) {
    KVSPAN_CHECK_ARG(keys.ndim == 3 || keys.ndim == 4, name,
                     ": expected shape [num_blocks, block_size, num_kv_heads, head_dim], got ",
                     shape_to_string(keys));
    return;
  }
  const char* layout_name = to_string(layout);
  KVSPAN_CHECK_ARG(keys.device.type == DeviceType::kCpu, name, ": expected a cpu tensor in layout ",
                   layout_name, ", got one on ", to_string(keys.device));
  KVSPAN_CHECK_ARG(keys.ndim == 4 && keys.shape[3] % 2 == 0, name,
                   ": expected shape [num_blocks, num_kv_heads, block_size, 2 * head_dim] in "
                   "layout ",
                   layout_name, ", got ", shape_to_string(keys));
  KVSPAN_CHECK_ARG(keys.strides[2] == keys.shape[3] || keys.shape[2] <= 1, name,
                   ": expected contiguous heads (stride ", keys.shape[3], " per token) in layout ",
                   layout_name, ", got stride ", keys.strides[2]);
  if (layout == KvLayout::kCpuVec) return;
  KVSPAN_CHECK(keys.dtype == kBFloat16, TypeError, name, ": expected bfloat16 in layout ",
               layout_name, ", got ", to_string(keys.dtype));
  KVSPAN_CHECK_ARG(keys.shape[2] % 16 == 0 && keys.shape[3] % 32 == 0, name,
                   ": expected a block_size and a head_dim that 16 divides in layout ", layout_name,
                   ", got ", shape_to_string(keys));
}

void check_rotation(const ReropeArgs& args, const ReropeLayer& layer, const ArgName& name) {
  const auto num_frequencies = static_cast<std::int64_t>(layer.inv_freq.size());
  if (num_frequencies == 0) return;
  const TensorView& keys = layer.k_src;
  const std::int64_t row = keys.shape[keys.ndim - 1];
  const std::int64_t head_dim = args.layout == KvLayout::kTokenRows ? row : row / 2;
  const std::int64_t most = (head_dim - args.rotary_offset) / 2;
  KVSPAN_CHECK_ARG(num_frequencies <= most, name,
                   ": expected at most (head_dim - rotary_offset) / 2 = ", most,
                   " frequencies, got ", num_frequencies);
  for (std::int64_t i = 0; i < num_frequencies; ++i) {
    KVSPAN_CHECK_ARG(std::isfinite(layer.inv_freq[i]), name, "[", i,
                     "]: expected a finite number, got ", layer.inv_freq[i]);
  }
  if (args.layout == KvLayout::kCpuAmx) {
    KVSPAN_CHECK_ARG(!layer.is_neox || num_frequencies % 2 == 0, name,
                     ": expected an even number of frequencies in layout cpu_amx, got ",
                     num_frequencies);
  }
  if (keys.device.type == DeviceType::kCuda) {
    KVSPAN_CHECK_ARG(num_frequencies <= cuda::kMaxFrequencies, name, ": expected at most ",
                     cuda::kMaxFrequencies, " frequencies on cuda, got ", num_frequencies);
  }
  if (!args.axes.empty()) {
    KVSPAN_CHECK_ARG(args.axes.size() == layer.inv_freq.size(), "axes: expected [", num_frequencies,
                     "] like ", name, ", got [", args.axes.size(), "]");
  }
}

void check_layer(const ReropeArgs& args, std::int64_t index) {
  const ReropeLayer& layer = args.layers[index];
  const ReropeLayer& first = args.layers[0];
  const std::int64_t shown = args.layers.size() > 1 ? index : -1;
  const ArgName k_src("k_src", shown), k_dst("k_dst", shown);
  check_keys(layer.k_src, k_src, args.layout);
  check_keys(layer.k_dst, k_dst, args.layout);
  check_block_tensors(layer.k_src, k_src, layer.k_dst, k_dst);
  check_rotation(args, layer, ArgName("inv_freq", shown));
  if (index > 0) {
    KVSPAN_CHECK_ARG(layer.k_src.device == first.k_src.device, k_src, ": expected a tensor on ",
                     to_string(first.k_src.device), " like k_src[0], got ",
                     to_string(layer.k_src.device));
    check_same_num_blocks(layer.k_src, k_src, first.k_src, {"k_src", 0});
    check_same_num_blocks(layer.k_dst, k_dst, first.k_dst, {"k_dst", 0});
  }
  if (!layer.v_src.data && !layer.v_dst.data) return;
  const ArgName v_src("v_src", shown), v_dst("v_dst", shown);
  KVSPAN_CHECK_ARG(layer.v_src.data && layer.v_dst.data, v_dst,
                   ": expected values both to read and to write, or neither");
  KVSPAN_CHECK_ARG(args.layout == KvLayout::kTokenRows, v_src, ": expected none in layout ",
                   to_string(args.layout), ", where k_src holds the values too");
  check_copied(layer.v_src, v_src, layer.v_dst, v_dst);
  KVSPAN_CHECK_ARG(layer.v_src.device == layer.k_src.device, v_src, ": expected a tensor on ",
                   to_string(layer.k_src.device), " like ", k_src, ", got ",
                   to_string(layer.v_src.device));
  check_same_num_blocks(layer.v_src, v_src, layer.k_src, k_src);
  check_same_num_blocks(layer.v_dst, v_dst, layer.k_dst, k_dst);
}

void check_axes(const ReropeArgs& args) {
  KVSPAN_CHECK_ARG(args.num_axes >= 1 && args.num_axes <= kMaxAxes, "deltas: expected 1 to ",
                   kMaxAxes, " position axes, got ", args.num_axes);
  const std::size_t expected = args.src_blocks.size() * static_cast<std::size_t>(args.num_axes);
  KVSPAN_CHECK_ARG(args.deltas.size() == expected, "deltas: expected [", args.src_blocks.size(),
                   "] like src_blocks, got [",
                   args.deltas.size() / static_cast<std::size_t>(args.num_axes), "]");
  KVSPAN_CHECK_ARG(args.num_axes == 1 || !args.axes.empty(),
                   "axes: expected the axis of each frequency, since deltas have ", args.num_axes,
                   " axes, got none");
  for (std::size_t i = 0; i < args.axes.size(); ++i) {
    KVSPAN_CHECK_ARG(args.axes[i] >= 0 && args.axes[i] < args.num_axes, "axes[", i,
                     "]: expected an axis in [0, ", args.num_axes, ") of deltas, got ",
                     args.axes[i]);
  }
  KVSPAN_CHECK_ARG(args.rotary_offset >= 0, "rotary_offset: expected 0 or more, got ",
                   args.rotary_offset);
  KVSPAN_CHECK_ARG(args.layout != KvLayout::kCpuAmx || args.rotary_offset % 2 == 0,
                   "rotary_offset: expected an even number in layout cpu_amx, got ",
                   args.rotary_offset);
}

}  // namespace

const char* to_string(KvLayout layout) {
  switch (layout) {
    case KvLayout::kTokenRows:
      return "token_rows";
    case KvLayout::kCpuVec:
      return "cpu_vec";
    case KvLayout::kCpuAmx:
      return "cpu_amx";
  }
  return "unknown";
}

KvLayout parse_kv_layout(std::string_view name) {
  for (const KvLayout layout : {KvLayout::kTokenRows, KvLayout::kCpuVec, KvLayout::kCpuAmx}) {
    if (name == to_string(layout)) return layout;
  }
  throw ArgumentError(concat("layout: expected token_rows, cpu_vec or cpu_amx, got '", name, "'"));
}

void rerope(const ReropeArgs& args) {
  KVSPAN_CHECK_ARG(!args.layers.empty(), "k_src: expected at least one layer, got none");
  check_axes(args);
  const auto num_layers = static_cast<std::int64_t>(args.layers.size());
  bool same_tensor = false;
  for (std::int64_t i = 0; i < num_layers; ++i) {
    check_layer(args, i);
    const ReropeLayer& layer = args.layers[i];
    same_tensor |= layer.k_src.data == layer.k_dst.data ||
                   (layer.v_src.data && layer.v_src.data == layer.v_dst.data);
  }
  const std::int64_t shown = num_layers > 1 ? 0 : -1;
  const TensorView& k_src = args.layers[0].k_src;
  check_moves(args.src_blocks, args.dst_blocks, k_src, {"k_src", shown}, args.layers[0].k_dst,
              {"k_dst", shown}, same_tensor);
  check_num_threads(args.num_threads);
  ReropeArgs resolved = args;
  resolved.isa = resolve_vector_isa(args.isa);
  const bool on_cuda = k_src.device.type == DeviceType::kCuda;
  if (on_cuda) require_cuda();

  std::vector<ReropeLayer> layers;
  for (ReropeLayer layer : args.layers) {
    layer.k_src = to_4d(layer.k_src);
    layer.k_dst = to_4d(layer.k_dst);
    if (layer.v_src.data) {
      layer.v_src = to_4d(layer.v_src);
      layer.v_dst = to_4d(layer.v_dst);
    }
    if (is_empty(layer.v_src)) layer.v_src.data = layer.v_dst.data = nullptr;
    if (!is_empty(layer.k_src)) layers.push_back(layer);
  }
  if (args.src_blocks.empty() || layers.empty()) return;
  resolved.layers = layers;
  on_cuda ? cuda::rerope(resolved) : cpu::rerope(resolved);
}

void copy_blocks(const BlockCopyArgs& args) {
  check_copied(args.src, "src", args.dst, "dst");
  check_moves(args.src_blocks, args.dst_blocks, args.src, "src", args.dst, "dst",
              args.src.data == args.dst.data);
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
