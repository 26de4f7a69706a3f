#include "move_schedule.h"

#include <algorithm>
#include <queue>
#include <utility>

#include "kvspan/bin_packing.h"
#include "kvspan/check.h"
#include "kvspan/graph.h"

namespace kvspan {
namespace {

// The saved blocks of one component: they are taken and given back together.
struct SlotGroup {
  std::int32_t first;  // in by_component_
  std::int32_t size;
  std::int32_t depth;
};

class Scheduler {
 public:
  Scheduler(Int32Vector successor, const ScheduleLimits& limits,
            std::span<const std::int64_t> dst_blocks)
      : limits_(limits),
        dst_blocks_(dst_blocks),
        num_moves_(static_cast<std::int32_t>(successor.size())) {
    PeeledGraph graph = peel_graph(std::move(successor));
    out_.move_of = std::move(graph.nodes);
    out_.num_cycles = graph.num_cycles();
    cycle_offsets_ = std::move(graph.cycle_offsets);
    successor_ = std::move(graph.successor);
    num_waits_.assign(num_moves_, 0);
  }

  Schedule run() {
    const bool has_cycles = out_.num_cycles > 0;
    const bool limits_depth = limits_.max_depth <= num_moves_;  // a cycle takes one more
    if (has_cycles || limits_depth) {
      if (limits_depth) find_roots();
      break_up();
    } else {
      for (const std::int32_t next : successor_) {
        if (next >= 0) ++num_waits_[next];
      }
    }
    const bool limits_batches = limits_.max_batch_size < num_moves_ + num_saved();
    if (limits_batches) count_followers();
    assign_slots();
    out_.steps.reserve(num_moves_ + num_saved());
    // At most, where each batch has one step; what is not used is never touched.
    out_.batch_offsets.reserve(num_moves_ + num_saved() + 1);
    out_.batch_offsets.push_back(0);
    limits_batches ? run_by_priority() : run_by_level();
    return std::move(out_);
  }

 private:
  std::int32_t num_saved() const { return static_cast<std::int32_t>(out_.saved.size()); }

  template <typename Visit>
  void for_each_reader(const SavedBlock& saved, const Visit& visit) const {
    for (std::int32_t i = saved.first_reader; i >= 0; i = out_.next_reader[i]) visit(i);
  }

  // A name for each weakly connected component: a step that all of its steps lead to.
  void find_roots() {
    root_.resize(num_moves_);
    for (std::int32_t c = 0; c < out_.num_cycles; ++c) {
      std::fill(root_.begin() + cycle_offsets_[c], root_.begin() + cycle_offsets_[c + 1],
                cycle_offsets_[c]);
    }
    for (std::int32_t step = cycle_offsets_.back(); step < num_moves_; ++step) {
      root_[step] = successor_[step] < 0 ? step : root_[successor_[step]];
    }
  }

  // Goes through the moves, those waited for first, and saves blocks until no cycle is left and
  // no move is deeper than the limit. Counts what each waits for.
  void break_up() {
    height_.assign(num_moves_, 0);
    // At most, where depth is not limited; what is not used is never touched.
    out_.cycle_steps.reserve(cycle_offsets_.back());
    out_.saved.reserve(num_moves_ / 2);
    for (std::int32_t step = num_moves_; step-- > cycle_offsets_.back();) raise_successor(step);
    for (auto c = static_cast<std::int32_t>(out_.num_cycles); c-- > 0;) {
      open_cycle(cycle_offsets_[c], cycle_offsets_[c + 1]);
    }
  }

  void raise_successor(std::int32_t step) {
    const std::int32_t next = successor_[step];
    if (next < 0) return;
    if (height_[step] + 1 >= limits_.max_depth) {
      cut(step);
    } else {
      height_[next] = std::max(height_[next], height_[step] + 1);
      ++num_waits_[next];
    }
  }

  // The steps begin to end - 1 are a cycle. The one with the longest tree behind it becomes the
  // last, so that the others can go on meanwhile.
  void open_cycle(std::int32_t begin, std::int32_t end) {
    out_.largest_cycle = std::max<std::int64_t>(out_.largest_cycle, end - begin);
    const auto heights = height_.begin();
    const auto last =
        static_cast<std::int32_t>(std::max_element(heights + begin, heights + end) - heights);
    std::int32_t step = successor_[last];
    cut(last);
    while (step != last) {
      const std::int32_t next = successor_[step];
      out_.cycle_steps.push_back(step);
      raise_successor(step);
      step = next;
    }
    out_.cycle_steps.push_back(last);
  }

  // The step reads a saved copy; its successor waits for the saving only.
  void cut(std::int32_t step) {
    if (out_.saved.empty()) {
      saved_of_.assign(num_moves_, -1);
      out_.reads_saved.assign(num_moves_, -1);
      out_.next_reader.assign(num_moves_, kNoMove);
    }
    const std::int32_t writer = std::exchange(successor_[step], kNoMove);
    if (saved_of_[writer] < 0) {
      saved_of_[writer] = num_saved();
      out_.saved.push_back({writer, kNoMove});
      ++num_waits_[writer];
      height_[writer] = std::max(height_[writer], 1);
    }
    SavedBlock& saved = out_.saved[saved_of_[writer]];
    out_.reads_saved[step] = saved_of_[writer];
    out_.next_reader[step] = std::exchange(saved.first_reader, step);
    ++num_waits_[step];
    height_[step] = std::max(height_[step], 1);
  }

  // The longest row of moves that starts at each step: what Hu's algorithm puts first.
  void count_followers() {
    num_followers_.resize(num_moves_ + num_saved());
    const auto count = [&](std::int32_t step) {
      num_followers_[step] = successor_[step] < 0 ? 0 : num_followers_[successor_[step]] + 1;
    };
    // A cycle's steps stand in the order they run in, all others after their successors.
    std::for_each(out_.cycle_steps.rbegin(), out_.cycle_steps.rend(), count);
    for (std::int32_t step = 0; step < num_moves_; ++step) count(step);
    for (std::int32_t s = 0; s < num_saved(); ++s) {
      std::int32_t most = num_followers_[out_.saved[s].writer];
      for_each_reader(out_.saved[s],
                      [&](std::int32_t step) { most = std::max(most, num_followers_[step]); });
      num_followers_[num_moves_ + s] = most + 1;
    }
  }

  // Components with saved blocks, grouped; deep ones first, so that those which share a bin are
  // alike and give their blocks back at about the same time.
  LargeVector<SlotGroup> group_saved_blocks() {
    by_component_.resize(num_saved());
    for (std::int32_t s = 0; s < num_saved(); ++s) by_component_[s] = s;
    const auto component = [&](std::int32_t s) {
      const std::int32_t writer = out_.saved[s].writer;
      return root_.empty() ? writer : root_[writer];
    };
    if (!root_.empty()) {  // else each is the only one of its cycle
      std::stable_sort(by_component_.begin(), by_component_.end(),
                       [&](std::int32_t a, std::int32_t b) { return component(a) < component(b); });
    }
    LargeVector<SlotGroup> groups;
    groups.reserve(num_saved());
    for (std::int32_t k = 0; k < num_saved(); ++k) {
      const std::int32_t s = by_component_[k];
      if (k == 0 || component(s) != component(by_component_[k - 1])) groups.push_back({k, 0, 0});
      ++groups.back().size;
      for_each_reader(out_.saved[s], [&](std::int32_t step) {
        groups.back().depth = std::max(groups.back().depth, height_[step]);
      });
    }
    const auto deeper = [](const SlotGroup& a, const SlotGroup& b) { return a.depth > b.depth; };
    if (!std::is_sorted(groups.begin(), groups.end(), deeper)) {
      std::stable_sort(groups.begin(), groups.end(), deeper);
    }
    return groups;
  }

  void assign_slots() {
    if (out_.saved.empty()) return;
    LargeVector<SlotGroup> on_device = group_saved_blocks();
    const auto too_large = std::stable_partition(
        on_device.begin(), on_device.end(),
        [&](const SlotGroup& group) { return group.size <= limits_.num_scratch; });
    const LargeVector<SlotGroup> on_host(too_large, on_device.end());
    on_device.erase(too_large, on_device.end());
    for (const SlotGroup& group : on_host) {
      if (group.size > limits_.num_host) refuse(group);
    }
    num_waits_.resize(num_moves_ + num_saved(), 0);
    out_.scratch_used = pack(on_device, limits_.num_scratch, false);
    out_.host_used = pack(on_host, limits_.num_host, true);
  }

  [[noreturn]] void refuse(const SlotGroup& group) const {
    const std::int32_t writer = out_.saved[by_component_[group.first]].writer;
    throw ArgumentError(concat("scratch_blocks: expected at least ", group.size,
                               ", for the moves that wait for each other through block ",
                               dst_blocks_[out_.move_of[writer]], ", got ", limits_.num_scratch,
                               " (or host_blocks of ", group.size, ", got ", limits_.num_host,
                               ")"));
  }

  // Bin-packs groups into rounds of at most capacity slots. A slot is written again when all that
  // read it in the round before have run. Rounds follow each other slot by slot, not as a whole;
  // since a group only ever waits for earlier rounds, none waits for ever. Returns the slots used.
  std::int64_t pack(std::span<const SlotGroup> groups, std::int64_t capacity, bool on_host) {
    LargeVector<std::int64_t> sizes;
    sizes.reserve(groups.size());
    std::int64_t total = 0;
    for (const SlotGroup& group : groups) {
      sizes.push_back(group.size);
      total += group.size;
    }
    if (sizes.empty()) return 0;
    capacity = std::min(capacity, total);
    const BinPacking rounds = first_fit_decreasing(sizes, capacity);

    LargeVector<std::int64_t> offsets(rounds.num_bins + 1, 0);
    for (const std::int64_t round : rounds.bin_of) ++offsets[round + 1];
    for (std::int64_t r = 0; r < rounds.num_bins; ++r) offsets[r + 1] += offsets[r];
    LargeVector<std::size_t> by_round(groups.size());
    for (std::size_t g = 0; g < groups.size(); ++g) by_round[offsets[rounds.bin_of[g]]++] = g;

    std::int32_t num_used = 0;
    Int32Vector last_on_slot(capacity, -1);
    for (const std::size_t g : by_round) {
      for (std::int32_t k = 0; k < groups[g].size; ++k) {
        const std::int32_t s = by_component_[groups[g].first + k];
        SavedBlock& saved = out_.saved[s];
        saved.slot = static_cast<std::int32_t>(rounds.offset_of[g]) + k;
        saved.on_host = on_host;
        num_used = std::max(num_used, saved.slot + 1);
        const std::int32_t before = std::exchange(last_on_slot[saved.slot], s);
        if (before < 0) continue;
        for_each_reader(out_.saved[before], [&](std::int32_t step) {
          successor_[step] = num_moves_ + s;
          ++num_waits_[num_moves_ + s];
        });
      }
    }
    return num_used;
  }

  template <typename Ready>
  void complete(std::int32_t step, const Ready& ready) {
    const auto release = [&](std::int32_t waiting) {
      if (--num_waits_[waiting] == 0) ready(waiting);
    };
    if (step < num_moves_) {
      if (successor_[step] >= 0) release(successor_[step]);
    } else {
      release(out_.saved[step - num_moves_].writer);
      for_each_reader(out_.saved[step - num_moves_], release);
    }
  }

  template <typename Ready>
  void start(const Ready& ready) const {
    const auto num_steps = static_cast<std::int32_t>(num_waits_.size());
    for (std::int32_t step = 0; step < num_steps; ++step) {
      const bool left_out = step < num_moves_ && successor_[step] == kLeftOut;
      if (num_waits_[step] == 0 && !left_out) ready(step);
    }
  }

  // Each step as early as it can.
  void run_by_level() {
    const auto push = [&](std::int32_t step) { out_.steps.push_back(step); };
    start(push);
    for (std::size_t head = 0; head < out_.steps.size();) {
      const std::size_t end = out_.steps.size();
      out_.batch_offsets.push_back(static_cast<std::int64_t>(end));
      for (; head < end; ++head) complete(out_.steps[head], push);
    }
  }

  // Hu's algorithm: of the steps that are ready, those with the longest row of moves behind them.
  void run_by_priority() {
    const std::int32_t num_levels =
        1 + *std::max_element(num_followers_.begin(), num_followers_.end());
    // A stack of ready steps for each level, one behind the other: ready[bottom[l]] to
    // ready[top[l] - 1]. Each step enters once.
    Int32Vector ready(num_waits_.size());
    Int32Vector bottom(num_levels + 1, 0);
    for (const std::int32_t level : num_followers_) ++bottom[level + 1];
    for (std::int32_t level = 0; level < num_levels; ++level) bottom[level + 1] += bottom[level];
    Int32Vector top(bottom.begin(), bottom.end() - 1);
    std::priority_queue<std::int32_t> levels;  // those with a step
    const auto push = [&](std::int32_t step) {
      const std::int32_t level = num_followers_[step];
      if (top[level] == bottom[level]) levels.push(level);
      ready[top[level]++] = step;
    };
    start(push);
    std::vector<std::int32_t> released;
    while (!levels.empty()) {
      const std::size_t begin = out_.steps.size();
      for (std::int64_t room = limits_.max_batch_size; room > 0 && !levels.empty(); --room) {
        const std::int32_t level = levels.top();
        out_.steps.push_back(ready[--top[level]]);
        if (top[level] == bottom[level]) levels.pop();
      }
      out_.batch_offsets.push_back(static_cast<std::int64_t>(out_.steps.size()));
      released.clear();
      for (std::size_t k = begin; k < out_.steps.size(); ++k) {
        fetch_ahead(k);
        complete(out_.steps[k], [&](std::int32_t waiting) { released.push_back(waiting); });
      }
      for (const std::int32_t step : released) push(step);
    }
  }

  // What completing some of the next steps looks up.
  void fetch_ahead(std::size_t k) const {
    constexpr std::size_t kDistance = 8;
    const auto step_at = [&](std::size_t at) {
      return at < out_.steps.size() && out_.steps[at] < num_moves_ ? out_.steps[at] : -1;
    };
    if (const std::int32_t step = step_at(k + 2 * kDistance); step >= 0) {
      __builtin_prefetch(&successor_[step]);
    }
    if (const std::int32_t step = step_at(k + kDistance); step >= 0 && successor_[step] >= 0) {
      __builtin_prefetch(&num_waits_[successor_[step]], 1);
      __builtin_prefetch(&num_followers_[successor_[step]]);
    }
  }

  const ScheduleLimits limits_;
  const std::span<const std::int64_t> dst_blocks_;
  std::int32_t num_moves_;
  Int32Vector cycle_offsets_;  // [num_cycles + 1], steps; those behind are on no cycle
  Int32Vector successor_;      // [num_moves], a step; after pack() also of a slot's readers
  Int32Vector num_waits_;      // [num_steps], steps that must run before
  Int32Vector height_;         // [num_moves], the batch it could run in
  Int32Vector root_;           // [num_moves], empty where depth is not limited
  Int32Vector saved_of_;       // [num_moves], by writer, -1 without
  Int32Vector by_component_;   // [num_saved], saved blocks
  Int32Vector num_followers_;  // [num_steps], where batches are limited
  Schedule out_;
};

}  // namespace

Schedule schedule_moves(Int32Vector successor, const ScheduleLimits& limits,
                        std::span<const std::int64_t> dst_blocks) {
  return Scheduler(std::move(successor), limits, dst_blocks).run();
}

}  // namespace kvspan
