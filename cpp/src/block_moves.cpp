#include "kvspan/block_moves.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "block_index.h"
#include "kvspan/check.h"

namespace kvspan {
namespace {

struct Move {
  std::int64_t src;
  std::int64_t dst;
  std::int64_t delta;
};

struct ScheduledMove {
  Move move;
  std::int64_t batch;
};

BlockIndex index_writers(std::span<const std::int64_t> dst_blocks) {
  BlockIndex writers(dst_blocks.size());
  for (std::size_t i = 0; i < dst_blocks.size(); ++i) {
    KVSPAN_CHECK_ARG(dst_blocks[i] >= 0, "dst_blocks[", i, "]: expected a block id >= 0, got ",
                     dst_blocks[i]);
    const std::int64_t other = writers.insert(dst_blocks[i], static_cast<std::int64_t>(i));
    KVSPAN_CHECK_ARG(other < 0, "dst_blocks: expected distinct blocks, got block ", dst_blocks[i],
                     " at both ", other, " and ", i);
  }
  return writers;
}

void check_scratch(std::span<const std::int64_t> scratch_blocks, const BlockIndex& writers,
                   std::span<const std::int64_t> src_blocks) {
  BlockIndex scratch(scratch_blocks.size());
  for (std::size_t i = 0; i < scratch_blocks.size(); ++i) {
    const std::int64_t block = scratch_blocks[i];
    KVSPAN_CHECK_ARG(block >= 0, "scratch_blocks[", i, "]: expected a block id >= 0, got ", block);
    KVSPAN_CHECK_ARG(scratch.insert(block, static_cast<std::int64_t>(i)) < 0,
                     "scratch_blocks: expected distinct blocks, got block ", block, " twice");
    KVSPAN_CHECK_ARG(writers.find(block) < 0, "scratch_blocks[", i, "]: block ", block,
                     " is also a destination");
  }
  for (std::size_t i = 0; i < src_blocks.size(); ++i) {
    KVSPAN_CHECK_ARG(scratch.find(src_blocks[i]) < 0, "scratch_blocks: block ", src_blocks[i],
                     " is also a source");
  }
}

// The scratch blocks and the first batch in which each may be written again.
class ScratchPool {
 public:
  explicit ScratchPool(std::span<const std::int64_t> blocks) {
    for (const std::int64_t block : blocks) free_.emplace(0, block);
  }

  std::pair<std::int64_t, std::int64_t> take() {
    const auto earliest = free_.top();
    free_.pop();
    return earliest;
  }

  void give_back(std::int64_t first_free_batch, std::int64_t block) {
    free_.emplace(first_free_batch, block);
  }

 private:
  using Entry = std::pair<std::int64_t, std::int64_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> free_;
};

// Counting sort by batch, keeping the order within one.
MovePlan to_plan(const std::vector<ScheduledMove>& scheduled) {
  std::int64_t num_batches = 0;
  for (const auto& [move, batch] : scheduled) num_batches = std::max(num_batches, batch + 1);
  MovePlan plan;
  plan.batch_offsets.assign(num_batches + 1, 0);
  for (const auto& [move, batch] : scheduled) ++plan.batch_offsets[batch + 1];
  for (std::int64_t b = 0; b < num_batches; ++b) plan.batch_offsets[b + 1] += plan.batch_offsets[b];
  plan.src_blocks.resize(scheduled.size());
  plan.dst_blocks.resize(scheduled.size());
  plan.deltas.resize(scheduled.size());
  std::vector<std::int64_t> next(plan.batch_offsets.begin(), plan.batch_offsets.end() - 1);
  for (const auto& [move, batch] : scheduled) {
    const std::int64_t i = next[batch]++;
    plan.src_blocks[i] = move.src;
    plan.dst_blocks[i] = move.dst;
    plan.deltas[i] = move.delta;
  }
  return plan;
}

}  // namespace

MovePlan plan_moves(std::span<const std::int64_t> src_blocks,
                    std::span<const std::int64_t> dst_blocks, std::span<const std::int64_t> deltas,
                    std::span<const std::int64_t> scratch_blocks) {
  const std::size_t n = src_blocks.size();
  KVSPAN_CHECK_ARG(dst_blocks.size() == n, "dst_blocks: expected [", n, "] like src_blocks, got [",
                   dst_blocks.size(), "]");
  KVSPAN_CHECK_ARG(deltas.size() == n, "deltas: expected [", n, "] like src_blocks, got [",
                   deltas.size(), "]");
  const BlockIndex writers = index_writers(dst_blocks);
  check_scratch(scratch_blocks, writers, src_blocks);

  // successor[i]: the move that overwrites i's source, and so must wait for i. Readers of a block
  // that is only rotated by nothing wait for nobody: that move is left out.
  const auto is_noop = [&](std::size_t i) {
    return src_blocks[i] == dst_blocks[i] && deltas[i] == 0;
  };
  std::vector<std::int64_t> successor(n, -1);
  std::vector<std::int64_t> num_waiting_for(n, 0);
  for (std::size_t i = 0; i < n; ++i) {
    KVSPAN_CHECK_ARG(src_blocks[i] >= 0, "src_blocks[", i, "]: expected a block id >= 0, got ",
                     src_blocks[i]);
    const std::int64_t writer = writers.find(src_blocks[i]);
    if (writer < 0 || writer == static_cast<std::int64_t>(i) || is_noop(writer)) continue;
    successor[i] = writer;
    ++num_waiting_for[writer];
  }

  std::vector<std::int64_t> batch(n, 0);
  std::vector<char> done(n, 0);
  std::vector<std::int64_t> ready;
  ready.reserve(n);
  for (std::size_t i = 0; i < n; ++i) {
    if (num_waiting_for[i] == 0) ready.push_back(static_cast<std::int64_t>(i));
  }
  std::vector<ScheduledMove> scheduled;
  scheduled.reserve(n + scratch_blocks.size());
  for (std::size_t head = 0; head < ready.size(); ++head) {
    const std::int64_t i = ready[head];
    done[i] = 1;
    if (!is_noop(i)) scheduled.push_back({{src_blocks[i], dst_blocks[i], deltas[i]}, batch[i]});
    const std::int64_t next = successor[i];
    if (next < 0) continue;
    batch[next] = std::max(batch[next], batch[i] + 1);
    if (--num_waiting_for[next] == 0) ready.push_back(next);
  }

  // Only cycles are left, and all their other readers have been scheduled.
  ScratchPool scratch(scratch_blocks);
  for (std::size_t first = 0; first < n; ++first) {
    if (done[first]) continue;
    KVSPAN_CHECK_ARG(!scratch_blocks.empty(),
                     "scratch_blocks: the moves form a cycle through block ", src_blocks[first],
                     ", so 1 scratch block is needed, got 0");
    auto [save_batch, saved] = scratch.take();
    scheduled.push_back({{src_blocks[first], saved, 0}, save_batch});
    std::int64_t previous_batch = save_batch;
    std::int64_t i = static_cast<std::int64_t>(first);
    do {
      i = successor[i];
      done[i] = 1;
      const bool closes = i == static_cast<std::int64_t>(first);
      previous_batch = std::max(batch[i], previous_batch + 1);
      scheduled.push_back(
          {{closes ? saved : src_blocks[i], dst_blocks[i], deltas[i]}, previous_batch});
    } while (i != static_cast<std::int64_t>(first));
    scratch.give_back(previous_batch + 1, saved);
  }
  return to_plan(scheduled);
}

void check_independent_moves(std::span<const std::int64_t> src_blocks,
                             std::span<const std::int64_t> dst_blocks, bool same_tensor) {
  const BlockIndex writers = index_writers(dst_blocks);
  if (!same_tensor) return;
  for (std::size_t i = 0; i < src_blocks.size(); ++i) {
    const std::int64_t writer = writers.find(src_blocks[i]);
    KVSPAN_CHECK_ARG(writer < 0 || writer == static_cast<std::int64_t>(i), "block ", src_blocks[i],
                     " is read by move ", i, " and written by move ", writer,
                     "; order the moves with plan_moves and run its batches one by one");
  }
}

}  // namespace kvspan
