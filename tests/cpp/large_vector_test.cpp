#include "kvspan/large_vector.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <thread>
#include <vector>

namespace kvspan {
namespace {

constexpr std::size_t kNumElements = 3'000'000;  // of eight bytes: a dozen huge pages

TEST(LargeVectorTest, FreedMemoryIsTheNextOnes) {
  const void* first;
  {
    const LargeVector<std::int64_t> vector(kNumElements);
    first = vector.data();
  }
  const LargeVector<std::int64_t> as_large(kNumElements - 1000);
  EXPECT_EQ(as_large.data(), first);
  const LargeVector<std::int64_t> another(kNumElements);
  EXPECT_NE(another.data(), first);
}

TEST(LargeVectorTest, AssignedElementsAreSetInUsedMemory) {
  for (const std::size_t count : {std::size_t{10}, std::size_t{20'000}, kNumElements}) {
    LargeVector<std::int64_t>(count, -1);
    LargeVector<std::int64_t> vector;
    vector.assign(count, 7);
    vector.resize(2 * count);
    EXPECT_EQ(std::accumulate(vector.begin(), vector.begin() + count, std::int64_t{0}),
              static_cast<std::int64_t>(7 * count));
  }
}

TEST(LargeVectorTest, ThreadsShareFreedMemory) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int round = 0; round < 50; ++round) {
        const LargeVector<std::int32_t> vector(std::size_t{10'000} * (1 + round % 5), t);
        for (const std::int32_t element : vector) ASSERT_EQ(element, t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace kvspan
