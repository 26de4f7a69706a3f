#include "rerope_cpu.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "block_layout.h"
#include "kvspan/check.h"
#include "kvspan/rerope.h"
#include "parallel.h"

namespace kvspan::cpu {
namespace {

// What a call writes fills the caches from here on, and is stored past them.
constexpr std::int64_t kMinStreamBytes = std::int64_t{1} << 24;

// Of a table: kernels read vectors of entries, and those that straddle cache lines cost two reads.
struct alignas(64) TableLine {
  static constexpr std::int64_t kSize = 16;
  float entries[kSize];
};

// What one layer's blocks need, but for their addresses.
struct LayerPlan {
  const ReropeLayer* layer;
  RotateKernel kernel;  // of no use where keys do not rotate
  RotateArgs args;
  BlockLayout k_layout, v_layout;  // for copies
};

// Layers [begin, end) of a plan, which share frequencies and pairing and so each delta's table.
struct LayerGroup {
  std::size_t begin, end;
};

// Moves [begin, end) of the sorted order, which share their deltas.
struct DeltaRun {
  std::int64_t begin, end;
  const std::int64_t* deltas;  // [num_axes]; null if all are 0
};

struct Plan {
  std::vector<LayerPlan> layers;
  std::vector<LayerGroup> groups;
  std::vector<std::int64_t> moves;  // move numbers, equal deltas together
  std::vector<DeltaRun> runs;
  std::int64_t table_size = 0;
  bool stream = false;
};

StorageType storage_type(DType dtype) {
  if (dtype == kFloat32) return kStoreF32;
  if (dtype == kBFloat16) return kStoreBF16;
  if (dtype == kFloat16) return kStoreF16;
  if (dtype == kFloat8E4M3FN) return kStoreE4M3;
  KVSPAN_ASSERT(dtype == kFloat8E5M2);
  return kStoreE5M2;
}

RotateKernel select_kernel(const ReropeArgs& args, const ReropeLayer& layer) {
  if (layer.inv_freq.empty()) return {};
  const RotateKernels kernels = [&] {
    switch (args.isa) {
#if defined(__x86_64__)
      case VectorIsa::kAvx512Vbmi:
        return rotate_kernels_avx512_vbmi();
      case VectorIsa::kAvx512:
        return rotate_kernels_avx512();
      case VectorIsa::kAvx2:
        return rotate_kernels_avx2();
#endif
      default:
        return rotate_kernels_baseline();
    }
  }();
  const StorageType type = storage_type(layer.k_src.dtype);
  const RotateKernel kernel = args.layout == KvLayout::kCpuVec ? kernels.vec[type][layer.is_neox]
                              : args.layout == KvLayout::kCpuAmx
                                  ? kernels.amx[layer.is_neox]
                                  : kernels.rows[type][layer.is_neox];
  KVSPAN_ASSERT(kernel.run != nullptr);
  return kernel;
}

LayerPlan plan_layer(const ReropeArgs& args, const ReropeLayer& layer) {
  const TensorView& src = layer.k_src;
  const TensorView& dst = layer.k_dst;
  LayerPlan plan{&layer, select_kernel(args, layer), {}, make_block_layout(src, dst), {}};
  if (layer.v_src.data) plan.v_layout = make_block_layout(layer.v_src, layer.v_dst);
  RotateArgs& block = plan.args;
  block.rotary_offset = args.rotary_offset;
  block.rotary_dim = 2 * static_cast<std::int64_t>(layer.inv_freq.size());
  if (args.layout != KvLayout::kTokenRows) {
    block.num_outer = src.shape[1];
    block.num_inner = 1;
    block.src_outer_stride = src.strides[1];
    block.dst_outer_stride = dst.strides[1];
    block.block_size = src.shape[2];
    block.row_size = src.shape[3] / 2;
    return plan;
  }
  const int outer = dst.strides[1] >= dst.strides[2] ? 1 : 2;
  const int inner = 3 - outer;
  block.num_outer = src.shape[outer];
  block.num_inner = src.shape[inner];
  block.src_outer_stride = src.strides[outer];
  block.src_inner_stride = src.strides[inner];
  block.dst_outer_stride = dst.strides[outer];
  block.dst_inner_stride = dst.strides[inner];
  block.row_size = src.shape[3];
  return plan;
}

// Sorts layers into groups, and moves by delta, so that each table is made once (per thread that
// meets it). Blocks of a span share a delta and usually come sorted already.
Plan make_plan(const ReropeArgs& args) {
  Plan plan;
  const auto same_table = [](const ReropeLayer& a, const ReropeLayer& b) {
    // The order of a table depends on the type.
    return a.is_neox == b.is_neox && a.k_src.dtype == b.k_src.dtype &&
           std::ranges::equal(a.inv_freq, b.inv_freq);
  };
  std::vector<const ReropeLayer*> left;
  for (const ReropeLayer& layer : args.layers) left.push_back(&layer);
  while (!left.empty()) {
    const ReropeLayer& first = *left.front();
    const std::size_t begin = plan.layers.size();
    std::erase_if(left, [&](const ReropeLayer* layer) {
      if (!same_table(first, *layer)) return false;
      plan.layers.push_back(plan_layer(args, *layer));
      return true;
    });
    plan.groups.push_back({begin, plan.layers.size()});
    plan.table_size = std::max(plan.table_size, plan.layers[begin].args.rotary_dim + kTablePadding);
  }

  const auto deltas_of = [&](std::int64_t move) { return &args.deltas[move * args.num_axes]; };
  const auto compare = [&](std::int64_t a, std::int64_t b) {
    return std::lexicographical_compare(deltas_of(a), deltas_of(a) + args.num_axes, deltas_of(b),
                                        deltas_of(b) + args.num_axes);
  };
  plan.moves.resize(args.src_blocks.size());
  std::iota(plan.moves.begin(), plan.moves.end(), 0);
  if (!std::is_sorted(plan.moves.begin(), plan.moves.end(), compare)) {
    std::stable_sort(plan.moves.begin(), plan.moves.end(), compare);
  }
  const auto num_moves = static_cast<std::int64_t>(plan.moves.size());
  for (std::int64_t begin = 0, end; begin < num_moves; begin = end) {
    const std::int64_t* deltas = deltas_of(plan.moves[begin]);
    for (end = begin + 1; end < num_moves && !compare(plan.moves[begin], plan.moves[end]);) ++end;
    const bool all_zero =
        std::all_of(deltas, deltas + args.num_axes, [](auto d) { return d == 0; });
    plan.runs.push_back({begin, end, all_zero ? nullptr : deltas});
  }
  return plan;
}

// Where entry i of a table stands in a kernel's order.
std::int64_t table_slot(const RotateKernel& kernel, std::int64_t i) {
  const std::int64_t in_step = i % kernel.step, step = i - in_step;
  switch (kernel.order) {
    case ElementOrder::kPlain:
      return i;
    case ElementOrder::kEvenOdd:
      return step + in_step % 2 * (kernel.step / 2) + in_step / 2;
    case ElementOrder::kLanes:
      return step + in_step % 16 / 4 * (kernel.step / 4) + in_step / 16 * 4 + in_step % 4;
    case ElementOrder::kPairLanes:  // entries are of pairs, 8 of which are 16 elements
      return step + in_step % 8 / 4 * (kernel.step / 2) + in_step / 8 * 4 + in_step % 4;
  }
  return i;
}

void fill_tables(const ReropeArgs& args, const LayerPlan& plan, const std::int64_t* deltas,
                 float* cos_table, float* sin_table) {
  const std::span<const float> inv_freq = plan.layer->inv_freq;
  const RotateKernel& kernel = plan.kernel;
  const auto put = [&](std::int64_t i, float c, float s) {
    const std::int64_t slot = table_slot(kernel, i);
    cos_table[slot] = c;
    sin_table[slot] = s;
  };
  // Of a step that holds halves of two rows, each half has all angles.
  const auto num_pairs = static_cast<std::int64_t>(inv_freq.size());
  const bool repeats = kernel.order == ElementOrder::kLanes && 2 * num_pairs == kernel.step;
  for (std::size_t i = 0; i < inv_freq.size(); ++i) {
    const std::int64_t delta = deltas[args.axes.empty() ? 0 : args.axes[i]];
    const double angle = static_cast<double>(delta) * static_cast<double>(inv_freq[i]);
    const auto c = static_cast<float>(std::cos(angle));
    const auto s = static_cast<float>(std::sin(angle));
    const auto pair = static_cast<std::int64_t>(i);
    if (kernel.expanded) {
      put(2 * pair, c, -s);
      put(2 * pair + 1, c, s);
    } else {
      put(pair, c, s);
      if (repeats) put(pair + num_pairs, c, s);
    }
  }
}

// Orders streamed stores before those of other threads that see this one's work done.
void end_stream() {
#if defined(__SSE2__)
  __builtin_ia32_sfence();
#endif
}

void copy(const BlockLayout& layout, const TensorView& src, std::int64_t src_block,
          const TensorView& dst, std::int64_t dst_block) {
  copy_block(layout, block_data(src, src_block), block_data(dst, dst_block));
}

[[gnu::always_inline]] inline void prefetch_pages(const LayerPlan& plan, std::int64_t src_block,
                                                  std::int64_t dst_block) {
  const ReropeLayer& layer = *plan.layer;
  prefetch_pages(plan.k_layout, block_data(layer.k_src, src_block),
                 block_data(layer.k_dst, dst_block));
  if (!layer.v_src.data) return;
  const char* from = block_data(layer.v_src, src_block);
  const char* to = block_data(layer.v_dst, dst_block);
  if (from != to) prefetch_pages(plan.v_layout, from, to);
}

// Items [begin, end) of one group's layers and one run's moves: layer by layer, so that blocks that
// lie side by side follow each other.
void move_items(const ReropeArgs& args, const Plan& plan, const LayerGroup& group,
                const DeltaRun& run, std::int64_t begin, std::int64_t end, const float* cos_table,
                const float* sin_table) {
  const std::int64_t run_size = run.end - run.begin;
  const auto layer_of = [&](std::int64_t item) -> const LayerPlan& {
    return plan.layers[group.begin + static_cast<std::size_t>(item / run_size)];
  };
  const auto move_of = [&](std::int64_t item) { return plan.moves[run.begin + item % run_size]; };
  const std::int64_t num_ahead = blocks_ahead(plan.layers[group.begin].k_layout);
  for (std::int64_t item = begin; item < end; ++item) {
    if ((item - begin) % num_ahead == 0) {
      const std::int64_t last = std::min(item + num_ahead, end - 1);
      for (std::int64_t next = item + 1; next <= last; ++next) {
        const std::int64_t move = move_of(next);
        prefetch_pages(layer_of(next), args.src_blocks[move], args.dst_blocks[move]);
      }
    }
    const LayerPlan& layer_plan = layer_of(item);
    const ReropeLayer& layer = *layer_plan.layer;
    const std::int64_t src = args.src_blocks[move_of(item)], dst = args.dst_blocks[move_of(item)];
    if (!run.deltas || !layer_plan.kernel.run) {
      copy(layer_plan.k_layout, layer.k_src, src, layer.k_dst, dst);
    } else {
      RotateArgs block = layer_plan.args;
      block.src = block_data(layer.k_src, src);
      block.dst = block_data(layer.k_dst, dst);
      if (item + 1 < end) {  // of another layer's shape, perhaps: fetching cannot fail
        const ReropeLayer& next = *layer_of(item + 1).layer;
        block.next_src = block_data(next.k_src, args.src_blocks[move_of(item + 1)]);
        block.next_dst = block_data(next.k_dst, args.dst_blocks[move_of(item + 1)]);
      }
      block.stream = plan.stream;
      block.cos_table = cos_table;
      block.sin_table = sin_table;
      layer_plan.kernel.run(block);
    }
    if (layer.v_src.data) copy(layer_plan.v_layout, layer.v_src, src, layer.v_dst, dst);
  }
}

}  // namespace

void rerope(const ReropeArgs& args) {
  Plan plan = make_plan(args);
  const auto num_moves = static_cast<std::int64_t>(args.src_blocks.size());
  const std::int64_t num_items = num_moves * static_cast<std::int64_t>(args.layers.size());
  std::int64_t total_bytes = 0;
  for (const ReropeLayer& layer : args.layers) {
    total_bytes += num_moves * block_bytes(layer.k_src);
    if (layer.v_src.data) total_bytes += num_moves * block_bytes(layer.v_src);
  }
  plan.stream = total_bytes >= kMinStreamBytes;
  const int num_threads = choose_num_threads(args.num_threads, num_items, total_bytes);
  const std::int64_t table_lines = (plan.table_size + TableLine::kSize - 1) / TableLine::kSize;
  std::vector<TableLine> tables(2 * table_lines * num_threads);

  parallel_ranges(num_threads, num_items, [&](int thread, std::int64_t begin, std::int64_t end) {
    float* cos_table = reinterpret_cast<float*>(tables.data() + 2 * table_lines * thread);
    float* sin_table = cos_table + table_lines * TableLine::kSize;
    std::int64_t first = 0;  // of the items of this group and run
    for (const LayerGroup& group : plan.groups) {
      const LayerPlan& any = plan.layers[group.begin];
      for (const DeltaRun& run : plan.runs) {
        const std::int64_t count =
            static_cast<std::int64_t>(group.end - group.begin) * (run.end - run.begin);
        const std::int64_t from = std::max(begin, first), to = std::min(end, first + count);
        if (from < to) {
          if (run.deltas && any.kernel.run) {
            fill_tables(args, any, run.deltas, cos_table, sin_table);
          }
          move_items(args, plan, group, run, from - first, to - first, cos_table, sin_table);
        }
        first += count;
      }
    }
    if (plan.stream) end_stream();
  });
}

}  // namespace kvspan::cpu
