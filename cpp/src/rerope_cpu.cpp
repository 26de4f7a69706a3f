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

RotateBlock select_kernel(const ReropeArgs& args) {
  const RotateKernels kernels = [&] {
    switch (args.isa) {
#if defined(__x86_64__)
      case VectorIsa::kAvx512:
        return rotate_kernels_avx512();
      case VectorIsa::kAvx2:
        return rotate_kernels_avx2();
#endif
      default:
        return rotate_kernels_baseline();
    }
  }();
  if (args.k_src.dtype == kFloat32) return kernels.float32[args.is_neox];
  if (args.k_src.dtype == kBFloat16) return kernels.bfloat16[args.is_neox];
  KVSPAN_ASSERT(args.k_src.dtype == kFloat16);
  return kernels.float16[args.is_neox];
}

void fill_tables(std::int64_t delta, const ReropeArgs& args, float* cos_table, float* sin_table) {
  for (std::size_t i = 0; i < args.inv_freq.size(); ++i) {
    const double angle = static_cast<double>(delta) * static_cast<double>(args.inv_freq[i]);
    const auto c = static_cast<float>(std::cos(angle));
    const auto s = static_cast<float>(std::sin(angle));
    if (args.is_neox) {
      cos_table[i] = c;
      sin_table[i] = s;
    } else {
      cos_table[2 * i] = cos_table[2 * i + 1] = c;
      sin_table[2 * i] = -s;
      sin_table[2 * i + 1] = s;
    }
  }
}

// Moves in an order that brings equal deltas together, so that each delta's table is made once (per
// thread that meets it). Blocks of a span share a delta and usually come sorted already.
std::vector<std::int64_t> order_by_delta(std::span<const std::int64_t> deltas) {
  std::vector<std::int64_t> order(deltas.size());
  std::iota(order.begin(), order.end(), 0);
  if (!std::is_sorted(deltas.begin(), deltas.end())) {
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int64_t a, std::int64_t b) { return deltas[a] < deltas[b]; });
  }
  return order;
}

}  // namespace

void rerope(const ReropeArgs& args) {
  const TensorView& k_src = args.k_src;
  const TensorView& k_dst = args.k_dst;
  const BlockLayout copy_layout = make_block_layout(k_src, k_dst);
  const RotateBlock rotate_block = select_kernel(args);

  RotateArgs block{};
  const int outer = k_dst.strides[1] >= k_dst.strides[2] ? 1 : 2;
  const int inner = 3 - outer;
  block.num_outer = k_src.shape[outer];
  block.num_inner = k_src.shape[inner];
  block.src_outer_stride = k_src.strides[outer];
  block.src_inner_stride = k_src.strides[inner];
  block.dst_outer_stride = k_dst.strides[outer];
  block.dst_inner_stride = k_dst.strides[inner];
  block.head_dim = k_src.shape[3];
  block.rotary_dim = 2 * static_cast<std::int64_t>(args.inv_freq.size());

  const auto num_moves = static_cast<std::int64_t>(args.deltas.size());
  const std::vector<std::int64_t> order = order_by_delta(args.deltas);
  const int num_threads =
      choose_num_threads(args.num_threads, num_moves, num_moves * block_bytes(k_src));
  const std::int64_t table_size = block.rotary_dim + kTablePadding;
  std::vector<float> tables(2 * table_size * num_threads);

  parallel_ranges(num_threads, num_moves, [&](int thread, std::int64_t begin, std::int64_t end) {
    float* cos_table = tables.data() + 2 * table_size * thread;
    float* sin_table = cos_table + table_size;
    RotateArgs move = block;
    move.cos_table = cos_table;
    move.sin_table = sin_table;
    std::int64_t table_delta = 0;  // a delta of 0 never reads the tables
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t delta = args.deltas[order[i]];
      const char* src = block_data(k_src, args.src_blocks[order[i]]);
      char* dst = block_data(k_dst, args.dst_blocks[order[i]]);
      if (delta == 0) {
        copy_block(copy_layout, src, dst);
        continue;
      }
      if (delta != table_delta) {
        fill_tables(delta, args, cos_table, sin_table);
        table_delta = delta;
      }
      move.src = src;
      move.dst = dst;
      const bool has_next = i + 1 < end;
      move.next_src = has_next ? block_data(k_src, args.src_blocks[order[i + 1]]) : nullptr;
      move.next_dst = has_next ? block_data(k_dst, args.dst_blocks[order[i + 1]]) : nullptr;
      rotate_block(move);
    }
  });
}

}  // namespace kvspan::cpu
