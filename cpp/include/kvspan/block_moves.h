// Plans moves of KV blocks so that overlapping sources and destinations are safe.
//
// A request needs block dst[i] to hold what block src[i] held, its keys rotated by delta[i] tokens.
// Destinations of some moves can be sources of others. The plan is a list of batches: within one,
// no block is written twice, or written by one move and read by another, so its moves may run in
// any order or at once; running the batches in order gives what gathering all sources first and
// scattering them afterwards would. Plain data in, plain data out: nothing here touches a tensor.
//
// How: every destination has one writer, so each move has at most one successor, the writer of its
// source. Kahn's algorithm gives each move the first batch after all readers of its destination.
// What is left are disjoint cycles; each is opened by saving one source in a scratch block. A
// scratch block serves one cycle after the other, so one is always enough; more of them let cycles
// run side by side. Time O(n + c log s) for n moves, c cycles, s scratch blocks; no recursion.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvspan {

// Batch b holds the moves batch_offsets[b] to batch_offsets[b + 1] - 1.
struct MovePlan {
  std::vector<std::int64_t> src_blocks;     // [num_moves]
  std::vector<std::int64_t> dst_blocks;     // [num_moves]
  std::vector<std::int64_t> deltas;         // [num_moves], tokens
  std::vector<std::int64_t> batch_offsets;  // [num_batches + 1]

  std::int64_t num_batches() const { return static_cast<std::int64_t>(batch_offsets.size()) - 1; }
};

// src_blocks, dst_blocks, deltas: [n]; block ids >= 0, destinations distinct; src == dst rotates in
// place, and is left out of the plan where its delta is 0. scratch_blocks: blocks whose content may
// be overwritten, distinct, none of them a source or destination. Throws ArgumentError.
MovePlan plan_moves(std::span<const std::int64_t> src_blocks,
                    std::span<const std::int64_t> dst_blocks, std::span<const std::int64_t> deltas,
                    std::span<const std::int64_t> scratch_blocks = {});

// Throws ArgumentError unless the moves may run in any order: destinations distinct and, where
// same_tensor, no block both read by one move and written by another.
void check_independent_moves(std::span<const std::int64_t> src_blocks,
                             std::span<const std::int64_t> dst_blocks, bool same_tensor);

}  // namespace kvspan
