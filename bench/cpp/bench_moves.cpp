// How long planning takes: shapes of moves from the easiest to the worst, at 10^5 and 10^6 moves.
//
// Counters: moves planned per second, and the plan's steps and batches. Deterministic inputs.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvspan/block_moves.h"

namespace {

using Ids = std::vector<std::int64_t>;

struct Case {
  Ids src, dst, deltas, scratch, free_blocks, ref_counts;
  kvspan::PlanMovesArgs limits;  // without its arrays

  kvspan::PlanMovesArgs args() const {
    kvspan::PlanMovesArgs args = limits;
    args.src_blocks = src;
    args.dst_blocks = dst;
    args.deltas = deltas;
    args.scratch_blocks = scratch;
    args.free_blocks = free_blocks;
    args.ref_counts = ref_counts;
    return args;
  }
};

Ids numbers(std::int64_t n, std::int64_t first = 0) {
  Ids ids(n);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

Ids shuffled(std::int64_t n) {
  Ids ids = numbers(n);
  std::mt19937_64 random(1);
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

Ids random_blocks(std::int64_t n) {
  std::mt19937_64 random(2);
  Ids ids(n);
  for (auto& id : ids) id = std::uniform_int_distribution<std::int64_t>(0, n - 1)(random);
  return ids;
}

// The pool has blocks 0 to 2n - 1; scratch blocks lie above.
Case make_case(Ids src, Ids dst, std::int64_t num_scratch) {
  const auto n = static_cast<std::int64_t>(src.size());
  return {.src = std::move(src),
          .dst = std::move(dst),
          .deltas = Ids(n, 1),
          .scratch = numbers(num_scratch, 2 * n),
          .free_blocks = {},
          .ref_counts = {},
          .limits = {}};
}

Case independent(std::int64_t n) { return make_case(numbers(n), numbers(n, n), 0); }
Case one_chain(std::int64_t n) { return make_case(numbers(n), numbers(n, 1), 0); }
Case one_cycle(std::int64_t n) {
  Ids dst = numbers(n, 1);
  dst.back() = 0;
  return make_case(numbers(n), std::move(dst), 1);
}
Case fan_out(std::int64_t n) { return make_case(Ids(n, 0), numbers(n, 1), 0); }
Case swaps(std::int64_t n) {
  Ids dst = numbers(n);
  for (auto& block : dst) block ^= 1;
  return make_case(numbers(n), std::move(dst), 64);
}
Case permutation(std::int64_t n) { return make_case(numbers(n), shuffled(n), 2); }
Case functional_graph(std::int64_t n) { return make_case(random_blocks(n), shuffled(n), 2); }
Case choose(std::int64_t n) {
  Case moves = make_case(random_blocks(n), Ids(n, kvspan::kChooseBlock), 0);
  moves.free_blocks = numbers(n, n);
  moves.ref_counts.resize(2 * n);
  for (std::int64_t block = 0; block < n; block += 2) moves.ref_counts[block] = 1;
  return moves;
}
Case launch_budget(std::int64_t n) {
  Case moves = functional_graph(n);
  moves.limits.launch_budget = 4096;
  moves.limits.num_layers = 32;
  return moves;
}
Case max_depth(std::int64_t n) {
  Case moves = make_case(random_blocks(n), shuffled(n), n);
  moves.limits.max_depth = 4;
  return moves;
}
Case host_staging(std::int64_t n) {
  Case moves = swaps(n);
  moves.scratch.clear();
  moves.limits.host_blocks = 64;
  return moves;
}

void plan(benchmark::State& state, Case (*make)(std::int64_t)) {
  const std::int64_t n = state.range(0);
  const Case moves = make(n);
  std::int64_t num_steps = 0;
  std::int64_t num_batches = 0;
  for (auto _ : state) {
    const kvspan::MovePlan plan = kvspan::plan_moves(moves.args());
    num_steps = static_cast<std::int64_t>(plan.kinds.size());
    num_batches = plan.num_batches();
    benchmark::DoNotOptimize(plan.kinds.data());
  }
  state.SetItemsProcessed(state.iterations() * n);
  state.counters["steps"] = static_cast<double>(num_steps);
  state.counters["batches"] = static_cast<double>(num_batches);
}

void add(const char* name, Case (*make)(std::int64_t)) {
  benchmark::RegisterBenchmark((std::string("plan_moves/") + name).c_str(), plan, make)
      ->Arg(100'000)
      ->Arg(1'000'000)
      ->Unit(benchmark::kMillisecond);
}

const bool registered = [] {
  add("independent", independent);
  add("one_chain", one_chain);
  add("one_cycle", one_cycle);
  add("fan_out", fan_out);
  add("swaps", swaps);
  add("permutation", permutation);
  add("functional_graph", functional_graph);
  add("choose_destinations", choose);
  add("launch_budget", launch_budget);
  add("max_depth_4", max_depth);
  add("host_staging", host_staging);
  return true;
}();

}  // namespace
