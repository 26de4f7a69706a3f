#include "kvspan/bin_packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "kvspan/check.h"

namespace kvspan {
namespace {

using Sizes = LargeVector<std::int64_t>;

// Every item in one bin, at an offset of its own; no bin too full, none empty.
void expect_valid(const Sizes& sizes, std::int64_t capacity, const BinPacking& packing) {
  ASSERT_EQ(packing.bin_of.size(), sizes.size());
  ASSERT_EQ(packing.offset_of.size(), sizes.size());
  std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> bins(packing.num_bins);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    ASSERT_GE(packing.bin_of[i], 0);
    ASSERT_LT(packing.bin_of[i], packing.num_bins);
    bins[packing.bin_of[i]].emplace_back(packing.offset_of[i], sizes[i]);
  }
  for (auto& bin : bins) {
    ASSERT_FALSE(bin.empty());
    std::sort(bin.begin(), bin.end());
    std::int64_t end = 0;
    for (const auto& [offset, size] : bin) {
      ASSERT_EQ(offset, end);
      end += size;
    }
    ASSERT_LE(end, capacity);
  }
}

// The fewest bins, by trying everything: items largest first, each in a bin in use or a new one.
std::size_t fewest_bins(const Sizes& sizes, std::size_t item, Sizes& room, std::int64_t capacity,
                        std::size_t best) {
  if (room.size() >= best) return best;
  if (item == sizes.size()) return room.size();
  for (std::size_t bin = 0; bin < room.size(); ++bin) {
    if (room[bin] < sizes[item]) continue;
    room[bin] -= sizes[item];
    best = fewest_bins(sizes, item + 1, room, capacity, best);
    room[bin] += sizes[item];
  }
  room.push_back(capacity - sizes[item]);
  best = fewest_bins(sizes, item + 1, room, capacity, best);
  room.pop_back();
  return best;
}

// First-fit decreasing as it is defined, in quadratic time.
Sizes plain_first_fit_decreasing(const Sizes& sizes, std::int64_t capacity) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return sizes[a] > sizes[b]; });
  Sizes bin_of(sizes.size()), room;
  for (const std::size_t item : order) {
    std::size_t bin = 0;
    while (bin < room.size() && room[bin] < sizes[item]) ++bin;
    if (bin == room.size()) room.push_back(capacity);
    room[bin] -= sizes[item];
    bin_of[item] = static_cast<std::int64_t>(bin);
  }
  return bin_of;
}

TEST(BinPackingTest, NothingToPack) { EXPECT_EQ(first_fit_decreasing({}, 5).num_bins, 0); }

TEST(BinPackingTest, LargestFirst) {
  const Sizes sizes{2, 5, 4, 7, 1, 3, 8};
  const BinPacking packing = first_fit_decreasing(sizes, 10);
  expect_valid(sizes, 10, packing);
  EXPECT_EQ(packing.num_bins, 3);
  EXPECT_EQ(packing.bin_of, (Sizes{0, 2, 2, 1, 2, 1, 0}));
}

TEST(BinPackingTest, CloseToTheOptimumOfSmallInputs) {
  std::mt19937 random(3);
  for (int round = 0; round < 600; ++round) {
    const std::int64_t capacity = std::uniform_int_distribution(1, 30)(random);
    Sizes sizes(std::uniform_int_distribution(1, 11)(random));
    for (auto& size : sizes) {
      size = std::uniform_int_distribution<std::int64_t>(1, capacity)(random);
    }
    const BinPacking packing = first_fit_decreasing(sizes, capacity);
    expect_valid(sizes, capacity, packing);
    EXPECT_EQ(packing.bin_of, plain_first_fit_decreasing(sizes, capacity));
    Sizes sorted = sizes, room;
    std::sort(sorted.rbegin(), sorted.rend());
    const auto optimum =
        static_cast<std::int64_t>(fewest_bins(sorted, 0, room, capacity, sizes.size() + 1));
    EXPECT_GE(packing.num_bins, optimum);
    EXPECT_LE(9 * packing.num_bins, 11 * optimum + 6);
  }
}

TEST(BinPackingTest, LargeInputs) {
  std::mt19937 random(4);
  for (const std::int64_t capacity : {1, 7, 1000, 1000000}) {
    Sizes sizes(200000);
    for (auto& size : sizes) {
      size = std::uniform_int_distribution<std::int64_t>(1, capacity)(random);
    }
    const BinPacking packing = first_fit_decreasing(sizes, capacity);
    expect_valid(sizes, capacity, packing);
    const std::int64_t total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
    EXPECT_GE(packing.num_bins, (total + capacity - 1) / capacity);
    EXPECT_LE(packing.num_bins * capacity, 2 * total + capacity);  // at most one bin is half empty
  }
}

TEST(BinPackingTest, LikeThePlainAlgorithm) {
  std::mt19937 random(5);
  Sizes sizes(3000);
  for (auto& size : sizes) size = std::uniform_int_distribution(1, 100)(random);
  EXPECT_EQ(first_fit_decreasing(sizes, 100).bin_of, plain_first_fit_decreasing(sizes, 100));
}

TEST(BinPackingTest, Errors) {
  for (const auto& [sizes, message] : std::vector<std::pair<Sizes, const char*>>{
           {{3, 6}, "sizes[1]: expected 1 to capacity = 5, got 6"},
           {{0}, "sizes[0]: expected 1 to capacity = 5, got 0"}}) {
    try {
      first_fit_decreasing(sizes, 5);
      FAIL() << "expected: " << message;
    } catch (const ArgumentError& error) {
      EXPECT_STREQ(error.what(), message);
    }
  }
}

}  // namespace
}  // namespace kvspan
