// CIDRA: plans concurrent moves of KV blocks, in place where that is safe (concurrent in-place
// duplicating ReRoPE algorithm, Span Queries, arXiv 2511.02749).
//
// A move wants a block to hold what block src held, its keys rotated by delta tokens. Moves of many
// requests share one pool, and destinations of some are sources of others. The plan is a list of
// batches of steps: within a batch no block is written twice, or written by one step and read by
// another, so its steps may run in any order or at once; running the batches in order gives what
// gathering all sources first and scattering them afterwards would. Plain data in, plain data out:
// nothing here touches a tensor.
//
// 1. Destinations. A move that leaves the choice (kChooseBlock) is done in place, V untouched, if
//    its source is not referenced, has been rotated fewer than max_generations times (see 7) and is
//    nobody's destination yet; of several such moves of one source the first gets it, those that
//    rotate by nothing before others. Otherwise it gets the next free block: a source that is
//    referenced is copied, always. No step ever writes a block that is referenced.
// 2. Duplication. A block wanted by several moves goes to one of them (the one in place or on a
//    cycle, else the first); the others duplicate it, before it is overwritten. Without them the
//    moves are a partial permutation: chains and cycles.
// 3. Cycles are the strongly connected components of more than one move (graph.h). Each is opened
//    by saving one of its blocks in a scratch block: a permutation costs as many copies as it has
//    moved blocks, and one for each cycle.
// 4. Depth. A cycle or chain of n moves takes about n batches. With max_depth, it is cut into
//    pieces that run side by side, at one saved block a cut.
// 5. Scratch. The saved blocks of a component are held together; components are bin-packed by
//    first-fit decreasing (bin_packing.h) into rounds of at most as many as there are scratch
//    blocks. A component that needs more saves its blocks on the host instead, at most host_blocks
//    at a time, packed likewise. Neither budget large enough: an error that names the need.
// 6. Launches. A batch has at most launch_budget steps; steps that more others wait for, one after
//    the other, come first (Hu's algorithm): without cycles and max_depth, no plan for the same
//    destinations has fewer batches. A batch whose steps times num_layers fit launch_budget is to
//    be fused: one launch for all layers.
// 7. Generations. Rotating a key in bf16 rounds it once more: after n rotations it is off by at
//    most about n 2^-8 of its length (a prototype measured 1.7e-3 fresh, 5.0e-3 after 8, 1.3e-2
//    after 64). Each move rotates once, saved or not, so its block gets the generation of its
//    source, plus one unless delta is 0. More than max_generations is an error: a copy drifts no
//    less, so the caller must choose another source or compute the block again.
//
// Time O(n + c log c) for n moves and c cycles or cut components, and O(n log n) at most where a
// launch budget is given; no recursion, no allocation per move.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "kvspan/large_vector.h"

namespace kvspan {

inline constexpr std::int64_t kChooseBlock = -1;
inline constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

struct PlanMovesArgs {
  // Block ids are >= 0. Explicit destinations are distinct. src == dst rotates in place; with a
  // delta of 0 there is nothing to do, and no step.
  std::span<const std::int64_t> src_blocks;  // [num_moves]
  std::span<const std::int64_t> dst_blocks;  // [num_moves], kChooseBlock where the planner chooses
  std::span<const std::int64_t> deltas;      // [num_moves], tokens

  // By block id; empty: all zero. References to what a block holds now, these moves' not counted.
  std::span<const std::int64_t> ref_counts;   // [num_blocks]
  std::span<const std::int64_t> generations;  // [num_blocks], rotations since computed

  // Blocks whose content may be overwritten: distinct, unreferenced, not sources or destinations.
  std::span<const std::int64_t> free_blocks;     // [num_free], chosen as destinations in this order
  std::span<const std::int64_t> scratch_blocks;  // [num_scratch]

  std::int64_t host_blocks = 0;               // blocks staged on the host at a time; 0 forbids it
  std::int64_t num_layers = 1;                // that every step is done for
  std::int64_t launch_budget = kUnlimited;    // steps x layers in one launch, >= 1
  std::int64_t max_depth = kUnlimited;        // batches, >= 2, not counting waits for scratch
  std::int64_t max_generations = kUnlimited;  // >= 0
};

enum class StepKind : std::uint8_t {
  kInPlace,      // rotate keys where they are; values stay
  kCopy,         // copy and rotate
  kDuplicate,    // copy and rotate a block that another move reads too: all but one of its moves
  kToScratch,    // copy, unrotated, to a scratch block
  kFromScratch,  // copy and rotate from a scratch block
  kToHost,       // copy, unrotated, to the host: the destination counts host blocks
  kFromHost,     // copy and rotate from the host: the source counts host blocks
};

struct MoveStats {
  std::int64_t num_copies = 0;      // steps that write another block than they read
  std::int64_t num_in_place = 0;    // steps of that kind
  std::int64_t num_duplicates = 0;  // steps of that kind
  std::int64_t num_saved = 0;       // steps to scratch blocks
  std::int64_t num_staged = 0;      // steps to the host
  std::int64_t num_cycles = 0;      // of two moves or more
  std::int64_t largest_cycle = 0;   // moves
  std::int64_t scratch_used = 0;    // scratch blocks
  std::int64_t host_used = 0;       // host blocks
  std::int64_t num_launches = 0;    // a fused batch is one, another is num_layers
};

// Batch b holds the steps batch_offsets[b] to batch_offsets[b + 1] - 1; none is empty.
struct MovePlan {
  LargeVector<StepKind> kinds;              // [num_steps]
  LargeVector<std::int64_t> src_blocks;     // [num_steps]
  LargeVector<std::int64_t> dst_blocks;     // [num_steps]
  LargeVector<std::int64_t> deltas;         // [num_steps], tokens
  LargeVector<std::int64_t> moves;          // [num_steps], the move that a step completes, or -1
  LargeVector<std::int64_t> batch_offsets;  // [num_batches + 1]
  LargeVector<std::uint8_t> fused;          // [num_batches], 1: one launch for all layers

  LargeVector<std::int64_t> destinations;  // [num_moves], as given or chosen
  LargeVector<std::int64_t> generations;   // [num_moves], of the destination afterwards
  MoveStats stats;

  std::int64_t num_batches() const { return static_cast<std::int64_t>(batch_offsets.size()) - 1; }
};

// Throws ArgumentError.
MovePlan plan_moves(const PlanMovesArgs& args);

// Throws ArgumentError unless the moves may run in any order: destinations distinct and, where
// same_tensor, no block both read by one move and written by another.
void check_independent_moves(std::span<const std::int64_t> src_blocks,
                             std::span<const std::int64_t> dst_blocks, bool same_tensor);

}  // namespace kvspan
