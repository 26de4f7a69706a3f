#include "gated_delta_cpu.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <new>
#include <vector>

#include "gated_delta_select.h"
#include "kvspan/gated_delta.h"
#include "parallel.h"

namespace kvspan::cpu {

static_assert(kChunk == kGatedDeltaChunk);

namespace {

// Of one item: more share a chunk's products of keys, fewer keep their states in the caches.
constexpr std::int64_t kMaxHeadsPerItem = 4;

// Multiply-adds that take as long as moving a byte, for the choice of threads.
constexpr std::int64_t kOperationsPerByte = 10;

struct AlignedDelete {
  void operator()(float* p) const { ::operator delete(p, std::align_val_t{64}); }
};

const char* element(const TensorView& tensor, std::int64_t row, std::int64_t head) {
  return tensor.as<char>() +
         (row * tensor.strides[0] + head * tensor.strides[1]) * tensor.dtype.size_bytes();
}

GatedDeltaItem make_item(const GatedDeltaArgs& args, const std::vector<float>& alpha,
                         std::int64_t sequence, std::int64_t first_head, std::int64_t num_heads) {
  const std::int64_t begin = args.cu_seqlens[sequence];
  const std::int64_t num_value_heads = args.v.shape[1];
  const std::int64_t key_head = first_head / (num_value_heads / args.k.shape[1]);
  GatedDeltaItem item{};
  item.type = state_type(args.v.dtype);
  item.num_tokens = args.cu_seqlens[sequence + 1] - begin;
  item.key_dim = args.k.shape[2];
  item.value_dim = args.v.shape[2];
  item.num_heads = num_heads;
  item.k = element(args.k, begin, key_head);
  item.k_token_stride = args.k.strides[0];
  item.v = element(args.v, begin, first_head);
  item.v_token_stride = args.v.strides[0];
  item.v_head_stride = args.v.strides[1];
  if (args.q.data) {
    item.q = element(args.q, begin, key_head);
    item.q_token_stride = args.q.strides[0];
    item.out = const_cast<char*>(element(args.out, begin, first_head));
    item.out_token_stride = args.out.strides[0];
    item.out_head_stride = args.out.strides[1];
  }
  item.alpha = alpha.data() + begin * num_value_heads + first_head;
  item.alpha_token_stride = num_value_heads;
  item.alpha_head_stride = 1;
  item.beta = reinterpret_cast<const float*>(element(args.beta, begin, first_head));
  item.beta_token_stride = args.beta.strides[0];
  item.beta_head_stride = args.beta.strides[1];
  if (args.initial_state.data) {
    item.initial_state =
        reinterpret_cast<const float*>(element(args.initial_state, sequence, first_head));
    item.initial_head_stride = args.initial_state.strides[1];
    item.initial_row_stride = args.initial_state.strides[2];
  }
  item.final_state =
      reinterpret_cast<float*>(const_cast<char*>(element(args.final_state, sequence, first_head)));
  item.final_head_stride = args.final_state.strides[1];
  item.final_row_stride = args.final_state.strides[2];
  item.is_value_key = args.state_layout == StateLayout::kValueKey;
  item.l2norm = args.qk_l2norm;
  item.scale = args.scale;
  return item;
}

}  // namespace

void gated_delta(const GatedDeltaArgs& args) {
  const std::int64_t num_tokens = args.v.shape[0], num_value_heads = args.v.shape[1];
  const std::int64_t num_key_heads = args.k.shape[1];
  const std::int64_t group = num_value_heads / num_key_heads;
  const auto num_sequences = static_cast<std::int64_t>(args.cu_seqlens.size()) - 1;
  const std::int64_t state_elements = args.k.shape[2] * args.v.shape[2];
  const std::int64_t total_bytes =
      num_value_heads * state_elements *
      (num_sequences * 2 * std::int64_t{sizeof(float)} + num_tokens * 3 / kOperationsPerByte);
  int num_threads =
      choose_num_threads(args.num_threads, num_sequences * num_value_heads, total_bytes);

  std::int64_t heads_per_item = std::min(group, kMaxHeadsPerItem);
  const auto items_per_sequence = [&] {
    return num_key_heads * ((group + heads_per_item - 1) / heads_per_item);
  };
  if (num_sequences * items_per_sequence() < num_threads) heads_per_item = 1;
  const std::int64_t items_of_one = items_per_sequence();
  const std::int64_t num_items = num_sequences * items_of_one;
  num_threads = static_cast<int>(std::min<std::int64_t>(num_threads, num_items));

  std::vector<float> alpha(num_tokens * num_value_heads);
  const auto fill_alpha = [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      const float* g = args.g.as<const float>() + token * args.g.strides[0];
      for (std::int64_t head = 0; head < num_value_heads; ++head) {
        alpha[token * num_value_heads + head] = std::exp(g[head * args.g.strides[1]]);
      }
    }
  };
  parallel_ranges(num_tokens < kChunk ? 1 : num_threads, num_tokens, fill_alpha);
  const auto run = select_kernels(args.isa).run;
  const std::int64_t workspace_size =
      gated_delta_workspace(args.k.shape[2], args.v.shape[2], heads_per_item).size;
  const std::unique_ptr<float, AlignedDelete> workspace(static_cast<float*>(
      ::operator new(static_cast<std::size_t>(workspace_size * num_threads) * sizeof(float),
                     std::align_val_t{64})));

  // Threads take the next item when they are done with one: sequences differ in length.
  std::atomic<std::int64_t> next{0};
  parallel_ranges(num_threads, num_threads, [&](int thread, std::int64_t, std::int64_t) {
    for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) {
      const std::int64_t items_per_key_head = items_of_one / num_key_heads;
      const std::int64_t key_head = i % items_of_one / items_per_key_head;
      const std::int64_t first = i % items_per_key_head * heads_per_item;
      GatedDeltaItem item = make_item(args, alpha, i / items_of_one, key_head * group + first,
                                      std::min(heads_per_item, group - first));
      item.workspace = workspace.get() + workspace_size * thread;
      run(item);
    }
  });
}

}  // namespace kvspan::cpu
