// The order of block moves: which move waits for which, without blocks or tensors.
//
// Every block has at most one writer, so each move has at most one successor: the move that
// overwrites its source. Moves are therefore trees that lead to a root, and cycles with trees that
// lead into them. A cycle is opened, and a tree that is too deep is cut, by saving the block that a
// move overwrites beforehand: moves that would have had to read it first read the saved copy.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvspan/large_vector.h"

namespace kvspan {

using Int32Vector = LargeVector<std::int32_t>;

inline constexpr std::int32_t kNoMove = -1;
inline constexpr std::int32_t kLeftOut =
    -2;  // as a successor: the move is not part of the schedule

struct ScheduleLimits {
  std::int64_t max_batch_size;  // steps in a batch
  std::int64_t max_depth;       // batches that moves which depend on each other take, >= 2
  std::int64_t num_scratch;     // saved blocks on the device at a time
  std::int64_t num_host;        // saved blocks on the host at a time
};

// A block that is copied elsewhere before its writer runs.
struct SavedBlock {
  std::int32_t writer;        // the step that overwrites the block
  std::int32_t first_reader;  // steps that read the copy: this, and on along next_reader
  std::int32_t slot = -1;     // a scratch block's, or a host block's, index
  bool on_host = false;
};

// Steps [0, num_moves) are moves, in an order of the schedule's own, which keeps steps that wait
// for each other close in memory; steps [num_moves, num_moves + saved.size()) save blocks.
struct Schedule {
  Int32Vector move_of;                      // [num_moves] the move that a step is
  Int32Vector steps;                        // steps in the order of the batches
  LargeVector<std::int64_t> batch_offsets;  // [num_batches + 1] into steps
  LargeVector<SavedBlock> saved;            //
  Int32Vector reads_saved;                  // [num_moves] what a step reads, or -1; or empty
  Int32Vector next_reader;                  // likewise, kNoMove ends
  Int32Vector cycle_steps;                  // the steps on cycles
  std::int64_t num_cycles = 0;
  std::int64_t largest_cycle = 0;
  std::int64_t scratch_used = 0;
  std::int64_t host_used = 0;
};

// successor: [num_moves], a move, kNoMove or kLeftOut; no move is its own. dst_blocks names blocks
// in messages. Throws ArgumentError where the saved blocks of a component fit neither budget.
Schedule schedule_moves(Int32Vector successor, const ScheduleLimits& limits,
                        std::span<const std::int64_t> dst_blocks);

}  // namespace kvspan
