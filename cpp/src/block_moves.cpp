#include "kvspan/block_moves.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "block_index.h"
#include "kvspan/check.h"
#include "move_schedule.h"

namespace kvspan {
namespace {

using Int64Span = std::span<const std::int64_t>;

constexpr std::size_t kFetchAhead = 32;                        // moves
constexpr std::size_t kLargePlan = std::size_t{1} << 17;       // moves: 1 MiB an array
constexpr std::size_t kMaxMoves = (std::size_t{1} << 30) - 1;  // steps have 32-bit numbers

std::int64_t largest(Int64Span blocks, std::int64_t at_least) {
  for (const std::int64_t block : blocks) at_least = std::max(at_least, block);
  return at_least;
}

void add_writer(BlockIndex& index, Int64Span dst_blocks, std::size_t i) {
  const std::int64_t block = dst_blocks[i];
  KVSPAN_CHECK_ARG(block >= 0, "dst_blocks[", i, "]: expected a block id >= 0, got ", block);
  std::int32_t& writer = index[block].writer;
  KVSPAN_CHECK_ARG(writer < 0, "dst_blocks: expected distinct blocks, got block ", block,
                   " at both ", writer, " and ", i);
  writer = static_cast<std::int32_t>(i);
}

class Planner {
 public:
  explicit Planner(const PlanMovesArgs& args)
      : args_(args),
        num_moves_(args.src_blocks.size()),
        num_blocks_(std::min(known_blocks(args.ref_counts), known_blocks(args.generations))),
        index_(2 * num_moves_, largest(args.src_blocks, largest(args.dst_blocks, 0))) {}

  MovePlan run() {
    index_destinations();
    check_spare_blocks();
    choose_destinations();
    count_generations();
    Schedule schedule =
        schedule_moves(find_successors(),
                       {.max_batch_size = args_.launch_budget,
                        .max_depth = args_.max_depth,
                        .num_scratch = static_cast<std::int64_t>(args_.scratch_blocks.size()),
                        .num_host = args_.host_blocks},
                       plan_.destinations);
    finish_kinds(schedule);
    write_steps(schedule);
    fuse_layers();
    count(schedule);
    return std::move(plan_);
  }

 private:
  static std::uint64_t known_blocks(Int64Span by_block) {
    return by_block.empty() ? std::uint64_t{1} << 63 : by_block.size();
  }

  std::int64_t ref_count(std::int64_t block) const {
    return args_.ref_counts.empty() ? 0 : args_.ref_counts[block];
  }

  bool does_nothing(std::size_t i) const {
    return plan_.destinations[i] == args_.src_blocks[i] && args_.deltas[i] == 0;
  }

  void fetch_ahead(Int64Span blocks, std::size_t i) const {
    if (i + kFetchAhead < num_moves_) index_.prefetch(blocks[i + kFetchAhead]);
  }

  // ref_counts and generations bound the block ids where they are given.
  void check_block(std::int64_t block, const char* name, std::size_t i) const {
    if (static_cast<std::uint64_t>(block) < num_blocks_) return;
    KVSPAN_CHECK_ARG(block >= 0, name, "[", i, "]: expected a block id >= 0, got ", block);
    for (const auto& [by_block, by_block_name] :
         {std::pair{args_.ref_counts, "ref_counts"}, std::pair{args_.generations, "generations"}}) {
      KVSPAN_CHECK_ARG(by_block.empty() || block < static_cast<std::int64_t>(by_block.size()), name,
                       "[", i, "]: expected a block in [0, ", by_block.size(), ") of ",
                       by_block_name, ", got ", block);
    }
  }

  void index_destinations() {
    for (std::size_t i = 0; i < num_moves_; ++i) {
      check_block(args_.src_blocks[i], "src_blocks", i);
      fetch_ahead(args_.dst_blocks, i);
      if (args_.dst_blocks[i] == kChooseBlock) continue;
      check_block(args_.dst_blocks[i], "dst_blocks", i);
      add_writer(index_, args_.dst_blocks, i);
    }
    plan_.destinations.assign(args_.dst_blocks.begin(), args_.dst_blocks.end());
    if (args_.ref_counts.empty()) return;
    for (std::size_t i = 0; i < num_moves_; ++i) {
      const std::int64_t block = args_.dst_blocks[i];
      if (block == kChooseBlock || does_nothing(i)) continue;
      KVSPAN_CHECK_ARG(ref_count(block) == 0, "dst_blocks[", i,
                       "]: expected an unreferenced block, got block ", block, " with ",
                       ref_count(block), " references");
    }
  }

  // Free and scratch blocks: distinct, unreferenced, and no move's source or destination.
  void check_spare_blocks() const {
    if (args_.free_blocks.empty() && args_.scratch_blocks.empty()) return;
    BlockSet spare(args_.free_blocks.size() + args_.scratch_blocks.size(),
                   largest(args_.free_blocks, largest(args_.scratch_blocks, 0)));
    for (const auto& [blocks, name] : {std::pair{args_.free_blocks, "free_blocks"},
                                       std::pair{args_.scratch_blocks, "scratch_blocks"}}) {
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        const std::int64_t block = blocks[i];
        check_block(block, name, i);
        KVSPAN_CHECK_ARG(spare.insert(block), name, "[", i,
                         "]: expected a block that is not free or scratch already, got block ",
                         block);
        KVSPAN_CHECK_ARG(index_.find(block).writer < 0, name, "[", i, "]: block ", block,
                         " is also a destination");
        KVSPAN_CHECK_ARG(ref_count(block) == 0, name, "[", i,
                         "]: expected an unreferenced block, got block ", block, " with ",
                         ref_count(block), " references");
      }
    }
    for (std::size_t i = 0; i < num_moves_; ++i) {
      KVSPAN_CHECK_ARG(!spare.contains(args_.src_blocks[i]), "src_blocks[", i, "]: block ",
                       args_.src_blocks[i], " is also a free or scratch block");
    }
  }

  void choose_destinations() {
    std::size_t num_open = 0;
    const auto take_source = [&](std::size_t i) {
      const std::int64_t block = args_.src_blocks[i];
      std::int32_t& writer = index_[block].writer;
      if (writer >= 0 || ref_count(block) > 0) return false;
      writer = static_cast<std::int32_t>(i);
      plan_.destinations[i] = block;
      return true;
    };
    for (std::size_t i = 0; i < num_moves_; ++i) {
      if (args_.dst_blocks[i] != kChooseBlock) continue;
      if (args_.deltas[i] != 0 || !take_source(i)) ++num_open;
    }
    if (num_open == 0) return;
    std::size_t num_chosen = 0;
    std::size_t num_wanted = 0;
    for (std::size_t i = 0; i < num_moves_; ++i) {
      fetch_ahead(args_.src_blocks, i);
      if (plan_.destinations[i] != kChooseBlock || take_source(i)) continue;
      if (++num_wanted > args_.free_blocks.size()) continue;
      plan_.destinations[i] = args_.free_blocks[num_chosen++];
    }
    KVSPAN_CHECK_ARG(num_wanted <= args_.free_blocks.size(), "free_blocks: expected at least ",
                     num_wanted, " for the moves whose destination is to be chosen, got ",
                     args_.free_blocks.size());
  }

  void count_generations() {
    plan_.generations.resize(num_moves_);
    for (std::size_t i = 0; i < num_moves_; ++i) {
      const std::int64_t block = args_.src_blocks[i];
      const std::int64_t before = args_.generations.empty() ? 0 : args_.generations[block];
      KVSPAN_CHECK_ARG(before >= 0, "generations[", block, "]: expected 0 or more, got ", before);
      plan_.generations[i] = before + (args_.deltas[i] != 0);
      KVSPAN_CHECK_ARG(
          args_.deltas[i] == 0 || before < args_.max_generations, "src_blocks[", i,
          "]: expected a block rotated fewer than max_generations = ", args_.max_generations,
          " times, got block ", block, " rotated ", before, " times");
    }
  }

  // The move that overwrites each move's source, and so must wait for it. Readers of a block that
  // is only rotated by nothing wait for nobody: that move is left out.
  Int32Vector find_successors() {
    for (std::size_t i = 0; i < num_moves_; ++i) {
      if (does_nothing(i)) index_[args_.src_blocks[i]].writer = kNoMove;
    }
    Int32Vector successor(num_moves_, kNoMove);
    kinds_.assign(num_moves_, StepKind::kCopy);
    for (std::size_t i = 0; i < num_moves_; ++i) {
      fetch_ahead(args_.src_blocks, i);
      const auto move = static_cast<std::int32_t>(i);
      const bool in_place = plan_.destinations[i] == args_.src_blocks[i];
      BlockIndex::Entry& entry = index_[args_.src_blocks[i]];
      if (entry.reader < 0) {
        entry.reader = move;
      } else {
        kinds_[in_place ? std::exchange(entry.reader, move) : move] = StepKind::kDuplicate;
        has_duplicates_ = true;
      }
      if (in_place) kinds_[i] = StepKind::kInPlace;
      if (does_nothing(i)) {
        successor[i] = kLeftOut;
      } else if (entry.writer >= 0 && entry.writer != move) {
        successor[i] = entry.writer;
      }
    }
    return successor;
  }

  // A block on a cycle goes to the cycle's move; the others duplicate it.
  void finish_kinds(const Schedule& schedule) {
    if (!has_duplicates_) return;
    for (const std::int32_t step : schedule.cycle_steps) {
      const std::int32_t move = schedule.move_of[step];
      BlockIndex::Entry& entry = index_[args_.src_blocks[move]];
      if (entry.reader == move) continue;
      kinds_[std::exchange(entry.reader, move)] = StepKind::kDuplicate;
      kinds_[move] = StepKind::kCopy;
    }
  }

  std::int64_t slot_block(const SavedBlock& saved) const {
    return saved.on_host ? saved.slot : args_.scratch_blocks[saved.slot];
  }

  void write_steps(Schedule& schedule) {
    const std::size_t num_steps = schedule.steps.size();
    const auto num_moves = static_cast<std::int32_t>(num_moves_);
    plan_.moves.resize(num_steps);
    for (std::size_t at = 0; at < num_steps; ++at) {
      const std::int32_t step = schedule.steps[at];
      plan_.moves[at] = step < num_moves ? schedule.move_of[step] : -1;
    }
    if (num_moves_ < kLargePlan || comes_in_order() || !look_up_packed()) {
      look_up(std::span<const StepKind>(kinds_), plan_.kinds);
      look_up(args_.src_blocks, plan_.src_blocks);
      look_up(Int64Span(plan_.destinations), plan_.dst_blocks);
      look_up(args_.deltas, plan_.deltas);
    }
    if (!schedule.saved.empty()) write_saved(schedule);
    plan_.batch_offsets = std::move(schedule.batch_offsets);
  }

  // The value of each step's move, 0 where it is none. One array at a time: each alone may fit a
  // cache where all of them do not.
  template <typename T>
  void look_up(std::span<const T> of_move, LargeVector<T>& of_step) const {
    const std::size_t num_steps = plan_.moves.size();
    of_step.resize(num_steps);
    const std::int64_t* const moves = plan_.moves.data();
    for (std::size_t at = 0; at < num_steps; ++at) {
      of_step[at] = moves[at] >= 0 ? of_move[moves[at]] : T{};
    }
  }

  // Whether most steps' moves are near those of the steps before, by a sample: then what is looked
  // up one array at a time is in the cache already.
  bool comes_in_order() const {
    constexpr std::size_t kSampled = 256;
    constexpr std::int64_t kNear = 512;  // moves: a page of memory
    const std::size_t stride = plan_.moves.size() / kSampled;
    std::size_t num_near = 0;
    for (std::size_t at = 1; at < plan_.moves.size() && stride > 0; at += stride) {
      num_near += std::abs(plan_.moves[at] - plan_.moves[at - 1]) < kNear;
    }
    return num_near > kSampled / 2;
  }

  // The same for large plans in no order, where no array fits a cache: what belongs to a move is
  // put into one cache line first. False, with nothing done, where numbers have more than 32 bits.
  bool look_up_packed() {
    struct alignas(16) Packed {
      std::int32_t src, dst, delta;
      StepKind kind;
    };
    LargeVector<Packed> packed(num_moves_);
    std::int64_t lost = 0;
    const auto narrow = [&](std::int64_t value) {
      const auto low = static_cast<std::int32_t>(value);
      lost |= value ^ low;
      return low;
    };
    for (std::size_t i = 0; i < num_moves_; ++i) {
      packed[i] = {narrow(args_.src_blocks[i]), narrow(plan_.destinations[i]),
                   narrow(args_.deltas[i]), kinds_[i]};
    }
    if (lost != 0) return false;
    const std::size_t num_steps = plan_.moves.size();
    plan_.kinds.resize(num_steps);
    plan_.src_blocks.resize(num_steps);
    plan_.dst_blocks.resize(num_steps);
    plan_.deltas.resize(num_steps);
    for (std::size_t at = 0; at < num_steps; ++at) {
      // Far ahead: there is little else to do meanwhile.
      const std::size_t ahead = std::min(at + 4 * kFetchAhead, num_steps - 1);
      __builtin_prefetch(&packed[std::max<std::int64_t>(plan_.moves[ahead], 0)]);
      const std::int64_t move = plan_.moves[at];
      const Packed of_move = move >= 0 ? packed[move] : Packed{};
      plan_.kinds[at] = of_move.kind;
      plan_.src_blocks[at] = of_move.src;
      plan_.dst_blocks[at] = of_move.dst;
      plan_.deltas[at] = of_move.delta;
    }
    return true;
  }

  // Steps that save a block, and those that read a saved one.
  void write_saved(const Schedule& schedule) {
    const auto num_moves = static_cast<std::int32_t>(num_moves_);
    for (std::size_t at = 0; at < schedule.steps.size(); ++at) {
      const std::int32_t step = schedule.steps[at];
      if (step >= num_moves) {
        const SavedBlock& saved = schedule.saved[step - num_moves];
        plan_.kinds[at] = saved.on_host ? StepKind::kToHost : StepKind::kToScratch;
        plan_.src_blocks[at] = plan_.destinations[schedule.move_of[saved.writer]];
        plan_.dst_blocks[at] = slot_block(saved);
      } else if (const std::int32_t s = schedule.reads_saved[step]; s >= 0) {
        const SavedBlock& saved = schedule.saved[s];
        plan_.kinds[at] = saved.on_host ? StepKind::kFromHost : StepKind::kFromScratch;
        plan_.src_blocks[at] = slot_block(saved);
      }
    }
  }

  void fuse_layers() {
    plan_.fused.resize(plan_.num_batches());
    const std::int64_t most = args_.launch_budget / args_.num_layers;
    for (std::int64_t b = 0; b < plan_.num_batches(); ++b) {
      const bool fused = plan_.batch_offsets[b + 1] - plan_.batch_offsets[b] <= most;
      plan_.fused[b] = fused;
      plan_.stats.num_launches += fused ? 1 : args_.num_layers;
    }
  }

  void count(const Schedule& schedule) {
    MoveStats& stats = plan_.stats;
    for (const StepKind kind : plan_.kinds) {
      stats.num_copies += kind != StepKind::kInPlace;
      stats.num_in_place += kind == StepKind::kInPlace;
      stats.num_duplicates += kind == StepKind::kDuplicate;
      stats.num_saved += kind == StepKind::kToScratch;
      stats.num_staged += kind == StepKind::kToHost;
    }
    stats.num_cycles = schedule.num_cycles;
    stats.largest_cycle = schedule.largest_cycle;
    stats.scratch_used = schedule.scratch_used;
    stats.host_used = schedule.host_used;
  }

  const PlanMovesArgs& args_;
  const std::size_t num_moves_;
  const std::uint64_t num_blocks_;  // block ids lie below
  BlockIndex index_;                // blocks that moves read or write
  LargeVector<StepKind> kinds_;     // [num_moves]
  bool has_duplicates_ = false;
  MovePlan plan_;
};

void check_limit(std::int64_t value, std::int64_t least, const char* name) {
  KVSPAN_CHECK_ARG(value >= least, name, ": expected ", least, " or more, got ", value);
}

}  // namespace

MovePlan plan_moves(const PlanMovesArgs& args) {
  const std::size_t n = args.src_blocks.size();
  KVSPAN_CHECK_ARG(n <= kMaxMoves, "src_blocks: expected at most ", kMaxMoves, " moves, got ", n);
  KVSPAN_CHECK_ARG(args.dst_blocks.size() == n, "dst_blocks: expected [", n,
                   "] like src_blocks, got [", args.dst_blocks.size(), "]");
  KVSPAN_CHECK_ARG(args.deltas.size() == n, "deltas: expected [", n, "] like src_blocks, got [",
                   args.deltas.size(), "]");
  check_limit(args.host_blocks, 0, "host_blocks");
  check_limit(args.num_layers, 1, "num_layers");
  check_limit(args.launch_budget, 1, "launch_budget");
  check_limit(args.max_depth, 2, "max_depth");
  check_limit(args.max_generations, 0, "max_generations");
  return Planner(args).run();
}

void check_independent_moves(std::span<const std::int64_t> src_blocks,
                             std::span<const std::int64_t> dst_blocks, bool same_tensor) {
  BlockIndex index(dst_blocks.size(), largest(dst_blocks, 0));
  for (std::size_t i = 0; i < dst_blocks.size(); ++i) add_writer(index, dst_blocks, i);
  if (!same_tensor) return;
  for (std::size_t i = 0; i < src_blocks.size(); ++i) {
    const std::int64_t writer = index.find(src_blocks[i]).writer;
    KVSPAN_CHECK_ARG(writer < 0 || writer == static_cast<std::int64_t>(i), "block ", src_blocks[i],
                     " is read by move ", i, " and written by move ", writer,
                     "; order the moves with plan_moves and run its batches one by one");
  }
}

}  // namespace kvspan
