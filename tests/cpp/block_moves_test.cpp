#include "kvspan/block_moves.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "kvspan/check.h"

namespace kvspan {
namespace {

using Ids = std::vector<std::int64_t>;

// What a block holds: the block its content came from and the sum of the deltas since.
using Content = std::pair<std::int64_t, std::int64_t>;

MovePlan plan_moves(const Ids& src, const Ids& dst, const Ids& deltas, const Ids& scratch = {}) {
  return kvspan::plan_moves({.src_blocks = src,
                             .dst_blocks = dst,
                             .deltas = deltas,
                             .ref_counts = {},
                             .generations = {},
                             .free_blocks = {},
                             .scratch_blocks = scratch});
}

// Runs the plan on a pool, checks that no batch has a conflict, and compares with gathering all
// sources first.
void expect_right(const Ids& src, const Ids& dst, const Ids& deltas, const Ids& scratch,
                  std::mt19937& random) {
  const MovePlan plan = plan_moves(src, dst, deltas, scratch);
  std::map<std::int64_t, Content> pool;
  const auto content = [&](std::int64_t block) {
    const auto found = pool.find(block);
    return found == pool.end() ? Content{block, 0} : found->second;
  };
  for (std::int64_t batch = 0; batch < plan.num_batches(); ++batch) {
    Ids order(plan.batch_offsets[batch + 1] - plan.batch_offsets[batch]);
    ASSERT_FALSE(order.empty());
    std::iota(order.begin(), order.end(), plan.batch_offsets[batch]);
    const auto part = [&](std::span<const std::int64_t> all) {
      return all.subspan(order.front(), order.size());
    };
    ASSERT_NO_THROW(check_independent_moves(part(plan.src_blocks), part(plan.dst_blocks), true));
    std::shuffle(order.begin(), order.end(), random);
    for (const std::int64_t i : order) {
      const auto [origin, delta] = content(plan.src_blocks[i]);
      pool[plan.dst_blocks[i]] = {origin, delta + plan.deltas[i]};
    }
  }
  std::set<std::int64_t> written(scratch.begin(), scratch.end());
  for (std::size_t i = 0; i < dst.size(); ++i) {
    ASSERT_EQ(content(dst[i]), (Content{src[i], deltas[i]})) << "move " << i;
    written.insert(dst[i]);
  }
  for (const auto& [block, ignored] : pool) {
    ASSERT_TRUE(written.contains(block)) << "block " << block << " was not to be written";
  }
}

void expect_right(const Ids& src, const Ids& dst, const Ids& scratch = {}) {
  std::mt19937 random(1);
  Ids deltas(src.size());
  std::iota(deltas.begin(), deltas.end(), 100);
  expect_right(src, dst, deltas, scratch, random);
}

TEST(BlockMovesTest, NothingToDo) { EXPECT_EQ(plan_moves({}, {}, {}).num_batches(), 0); }

TEST(BlockMovesTest, IndependentMovesAreOneBatch) {
  EXPECT_EQ(plan_moves(Ids{1, 1, 2}, Ids{5, 6, 7}, Ids{0, 1, 2}).num_batches(), 1);
  expect_right({1, 1, 2}, {5, 6, 7});
}

TEST(BlockMovesTest, Chain) { expect_right({0, 1, 2, 3}, {1, 2, 3, 4}); }

TEST(BlockMovesTest, SelfMove) {
  expect_right({3, 4}, {3, 9});
  EXPECT_EQ(plan_moves(Ids{3}, Ids{3}, Ids{0}).num_batches(), 0);
}

TEST(BlockMovesTest, SelfMoveWithOtherReaders) { expect_right({3, 3, 3}, {3, 7, 8}); }

TEST(BlockMovesTest, CycleWithFanOut) { expect_right({0, 1, 2, 1, 5}, {1, 2, 0, 5, 6}, {9}); }

TEST(BlockMovesTest, ManyCyclesShareOneScratchBlock) {
  expect_right({0, 1, 2, 3, 4, 5, 6}, {1, 0, 3, 2, 5, 6, 4}, {9});
}

TEST(BlockMovesTest, MoreScratchGivesFewerBatches) {
  const Ids src{0, 1, 2, 3, 4, 5}, dst{1, 0, 3, 2, 5, 4}, deltas(6);
  EXPECT_EQ(plan_moves(src, dst, deltas, Ids{10}).num_batches(), 9);
  EXPECT_EQ(plan_moves(src, dst, deltas, Ids{10, 11, 12}).num_batches(), 3);
}

TEST(BlockMovesTest, RandomPermutationsWithFanOut) {
  std::mt19937 random(42);
  for (int round = 0; round < 300; ++round) {
    const int n = std::uniform_int_distribution(1, 60)(random);
    Ids dst(80);
    std::iota(dst.begin(), dst.end(), 0);
    std::shuffle(dst.begin(), dst.end(), random);
    dst.resize(n);
    Ids src(n), deltas(n);
    for (auto& block : src) block = std::uniform_int_distribution(0, 79)(random);
    if (round % 2 == 0) {
      src = dst;
      std::shuffle(src.begin(), src.end(), random);
    }
    for (auto& delta : deltas) delta = std::uniform_int_distribution(-2, 2)(random);
    Ids scratch(std::uniform_int_distribution(1, 3)(random));
    std::iota(scratch.begin(), scratch.end(), 1000);
    expect_right(src, dst, deltas, scratch, random);
  }
}

TEST(BlockMovesTest, MillionBlockCycleNeedsNoStack) {
  const std::int64_t n = 1000000;
  Ids src(n), dst(n), deltas(n);
  std::iota(src.begin(), src.end(), 0);
  for (std::int64_t i = 0; i < n; ++i) dst[i] = (i + 1) % n;
  EXPECT_EQ(plan_moves(src, dst, deltas, Ids{n}).num_batches(), n + 1);
}

// Large plans look their moves up another way, unless numbers have more than 32 bits.
TEST(BlockMovesTest, LargePlansInNoOrder) {
  std::mt19937 random(7);
  const int n = 140000;
  const Ids scratch{n, n + 1};
  Ids src(n), dst(n), deltas(n);
  std::iota(dst.begin(), dst.end(), 0);
  std::shuffle(dst.begin(), dst.end(), random);
  for (auto& block : src) block = std::uniform_int_distribution(0, n - 1)(random);
  for (auto& delta : deltas) delta = std::uniform_int_distribution(-(1 << 20), 1 << 20)(random);
  expect_right(src, dst, deltas, scratch, random);

  const MovePlan plan = plan_moves(src, dst, deltas, scratch);
  const auto plus = [](auto ids, std::int64_t added) {
    for (auto& id : ids) id += added;
    return ids;
  };
  const std::int64_t wide = std::int64_t{5} << 32;
  const MovePlan of_wide_ids =
      plan_moves(plus(src, wide), plus(dst, wide), deltas, plus(scratch, wide));
  EXPECT_EQ(of_wide_ids.src_blocks, plus(plan.src_blocks, wide));
  EXPECT_EQ(of_wide_ids.dst_blocks, plus(plan.dst_blocks, wide));
  EXPECT_EQ(of_wide_ids.deltas, plan.deltas);
  EXPECT_EQ(of_wide_ids.kinds, plan.kinds);

  Ids wide_deltas = deltas;
  wide_deltas[n / 2] = wide;
  expect_right(src, dst, wide_deltas, scratch, random);
}

// Requests that leave the choice, over referenced and used blocks, with every limit at once.
TEST(BlockMovesTest, RandomProblems) {
  std::mt19937 random(7);
  const auto number = [&](int least, int most) {
    return std::uniform_int_distribution(least, most)(random);
  };
  int num_staged = 0, num_saved = 0, num_in_place = 0;
  for (int round = 0; round < 2000; ++round) {
    const int n = number(0, 40);
    Ids dst(50);
    std::iota(dst.begin(), dst.end(), 0);
    std::shuffle(dst.begin(), dst.end(), random);
    dst.resize(n);
    Ids src(n), deltas(n), ref_counts(200), generations(200);
    for (auto& block : src) block = number(0, 49);
    if (round % 3 == 0) std::shuffle((src = dst).begin(), src.end(), random);
    for (auto& delta : deltas) delta = number(-2, 2);
    for (int block = 0; block < 50; ++block) ref_counts[block] = number(0, 1);
    for (auto& block : dst) {
      if (number(0, 2) == 0) block = kChooseBlock;
      if (block != kChooseBlock) ref_counts[block] = 0;
    }
    for (auto& generation : generations) generation = number(0, 3);
    Ids free_blocks(n), scratch(number(0, 3));
    std::iota(free_blocks.begin(), free_blocks.end(), 50);
    std::iota(scratch.begin(), scratch.end(), 100);
    const std::int64_t launch_budget = number(0, 1) ? kUnlimited : number(1, 20);
    const std::int64_t max_depth = number(0, 1) ? kUnlimited : number(2, 5);
    const MovePlan plan = kvspan::plan_moves({.src_blocks = src,
                                              .dst_blocks = dst,
                                              .deltas = deltas,
                                              .ref_counts = ref_counts,
                                              .generations = generations,
                                              .free_blocks = free_blocks,
                                              .scratch_blocks = scratch,
                                              .host_blocks = 40,
                                              .num_layers = 2,
                                              .launch_budget = launch_budget,
                                              .max_depth = max_depth,
                                              .max_generations = 4});
    // Host blocks as blocks from 1000 on, of a pool of contents.
    std::map<std::int64_t, Content> pool;
    const auto content = [&](std::int64_t block) {
      const auto found = pool.find(block);
      return found == pool.end() ? Content{block, 0} : found->second;
    };
    for (std::int64_t batch = 0; batch < plan.num_batches(); ++batch) {
      Ids from, to;
      const std::int64_t begin = plan.batch_offsets[batch], end = plan.batch_offsets[batch + 1];
      ASSERT_LT(begin, end);
      ASSERT_LE(end - begin, launch_budget);
      ASSERT_EQ(plan.fused[batch] != 0, end - begin <= launch_budget / 2);
      for (std::int64_t i = begin; i < end; ++i) {
        from.push_back(plan.src_blocks[i] + (plan.kinds[i] == StepKind::kFromHost ? 1000 : 0));
        to.push_back(plan.dst_blocks[i] + (plan.kinds[i] == StepKind::kToHost ? 1000 : 0));
      }
      ASSERT_NO_THROW(check_independent_moves(from, to, true));
      for (std::size_t i = from.size(); i-- > 0;) {
        const auto [origin, delta] = content(from[i]);
        ASSERT_LT(origin, 50) << "read before written";
        pool[to[i]] = {origin, delta + plan.deltas[begin + i]};
      }
    }
    std::set<std::int64_t> writable(scratch.begin(), scratch.end());
    for (int i = 0; i < n; ++i) {
      const std::int64_t block = plan.destinations[i];
      ASSERT_TRUE(dst[i] == kChooseBlock || dst[i] == block);
      ASSERT_EQ(content(block), (Content{src[i], deltas[i]})) << "move " << i;
      ASSERT_EQ(plan.generations[i], generations[src[i]] + (deltas[i] != 0));
      writable.insert(block);
    }
    for (const auto& [block, ignored] : pool) {
      ASSERT_TRUE(block >= 1000 || (writable.contains(block) && ref_counts[block] == 0));
    }
    num_staged += static_cast<int>(plan.stats.num_staged);
    num_saved += static_cast<int>(plan.stats.num_saved);
    num_in_place += static_cast<int>(plan.stats.num_in_place);
  }
  EXPECT_GT(num_staged, 100);
  EXPECT_GT(num_saved, 100);
  EXPECT_GT(num_in_place, 100);
}

void expect_error(const char* message, const Ids& src, const Ids& dst, const Ids& deltas,
                  const Ids& scratch = {}) {
  try {
    plan_moves(src, dst, deltas, scratch);
    FAIL() << "expected: " << message;
  } catch (const ArgumentError& error) {
    EXPECT_STREQ(error.what(), message);
  }
}

TEST(BlockMovesTest, Errors) {
  expect_error("dst_blocks: expected distinct blocks, got block 5 at both 0 and 2", {0, 1, 2},
               {5, 6, 5}, {0, 0, 0});
  expect_error("dst_blocks: expected [2] like src_blocks, got [1]", {0, 1}, {5}, {0, 0});
  expect_error("deltas: expected [1] like src_blocks, got [0]", {0}, {5}, {});
  expect_error("src_blocks[0]: expected a block id >= 0, got -1", {-1}, {5}, {0});
  expect_error("dst_blocks[0]: expected a block id >= 0, got -3", {1}, {-3}, {0});
  expect_error(
      "scratch_blocks: expected at least 1, for the moves that wait for each other through block "
      "0, "
      "got 0 (or host_blocks of 1, got 0)",
      {0, 1}, {1, 0}, {0, 0});
  expect_error("scratch_blocks[0]: block 1 is also a destination", {0}, {1}, {0}, {1});
  expect_error("src_blocks[0]: block 0 is also a free or scratch block", {0}, {1}, {0}, {0});
  expect_error(
      "scratch_blocks[1]: expected a block that is not free or scratch already, got block 8", {0},
      {1}, {0}, {8, 8});
  // The same where block ids are too large for a bit each.
  const std::int64_t far = std::int64_t{1} << 40;
  expect_error(
      "scratch_blocks[1]: expected a block that is not free or scratch already, got block "
      "1099511627776",
      {0}, {1}, {0}, {far, far});
  expect_error("src_blocks[0]: block 1099511627776 is also a free or scratch block", {far}, {1},
               {0}, {far});
}

}  // namespace
}  // namespace kvspan
