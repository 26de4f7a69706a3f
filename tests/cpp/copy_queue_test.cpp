// The copy queue by its CPU threads; the rest of it is the same on every device. Also the pieces
// that copies are made of, and the kernel by the host shim.
#include "host_shim.h"
// The shim comes first: it stands in for <cuda_runtime.h>.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <latch>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "copy_segments.cuh"
#include "kvspan/copy_queue.h"
#include "kvspan/device.h"
#include "test_tensor.h"

namespace kvspan {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Segments = std::vector<CopySegment>;

void copy_now(std::span<const CopySegment> segments) {
  for (const CopySegment& s : segments) {
    std::memcpy(s.dst, s.src, static_cast<std::size_t>(s.bytes));
  }
}

// A door that copies stop at, for tests that must know what is under way.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void await(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
  bool open_ = false;
};

// Pieces of src to places of dst, all of them, in random order and of random sizes.
Segments scattered(const Bytes& src, Bytes& dst, std::mt19937& random) {
  Segments segments;
  std::size_t at = 0;
  while (at < src.size()) {
    const std::size_t bytes = std::min<std::size_t>(src.size() - at, 1 + random() % 300);
    segments.push_back({src.data() + at, dst.data() + at, static_cast<std::int64_t>(bytes)});
    at += bytes;
  }
  std::shuffle(segments.begin(), segments.end(), random);
  return segments;
}

TEST(CopyQueueTest, CopiesWhateverTheChunksAndThreads) {
  std::mt19937 random(1);
  for (const std::int64_t chunk_bytes : {1, 7, 256, 100'000}) {
    for (const int num_threads : {1, 3}) {
      CopyQueue queue({.chunk_bytes = chunk_bytes,
                       .max_bytes_in_flight = 2 * chunk_bytes,
                       .num_threads = num_threads});
      const Bytes src = test::make_bytes(5000, 3);
      std::vector<Bytes> dsts(4, Bytes(src.size()));
      std::vector<CopyJob> jobs;
      for (Bytes& dst : dsts) jobs.push_back(queue.submit(scattered(src, dst, random)));
      for (std::size_t i = 0; i < jobs.size(); ++i) {
        EXPECT_TRUE(jobs[i].wait());
        EXPECT_EQ(jobs[i].state(), CopyState::kDone);
        EXPECT_EQ(jobs[i].num_done(), jobs[i].num_chunks());
        EXPECT_EQ(jobs[i].bytes_done(), 5000);
        EXPECT_EQ(dsts[i], src);
      }
      const CopyQueueStats stats = queue.stats();
      EXPECT_EQ(stats.jobs_done, 4);
      EXPECT_EQ(stats.bytes_done, 4 * 5000);
      EXPECT_EQ(stats.bytes_queued, 0);
      EXPECT_EQ(stats.bytes_in_flight, 0);
      EXPECT_LE(stats.most_in_flight, 2 * chunk_bytes);
    }
  }
}

TEST(CopyQueueTest, ChunksComeInOrderWithAnEventEach) {
  const Bytes src = test::make_bytes(64, 1);
  Bytes dst(64);
  Gate gate;
  std::atomic<int> num_started = 0;
  CopyQueue queue({.chunk_bytes = 16, .copy = [&](std::span<const CopySegment> segments) {
                     if (++num_started == 3) gate.pass();
                     copy_now(segments);
                   }});
  const CopyJob job = queue.submit({{src.data(), dst.data(), 64}});
  EXPECT_EQ(job.num_chunks(), 4);
  EXPECT_TRUE(job.wait(2));
  gate.await(1);
  EXPECT_EQ(job.num_done(), 2);
  EXPECT_EQ(job.bytes_done(), 32);
  EXPECT_EQ(job.state(), CopyState::kPending);
  EXPECT_EQ(job.wait_for(0.001), std::nullopt);
  EXPECT_EQ(job.wait_for(0, 2), true);
  EXPECT_TRUE(std::equal(src.begin(), src.begin() + 32, dst.begin()));
  gate.open();
  EXPECT_TRUE(job.wait_on_stream(nullptr));
  EXPECT_EQ(src, dst);
  EXPECT_THROW(job.wait(5), ArgumentError);
}

// What is urgent overtakes between chunks; among equals who came first goes first.
TEST(CopyQueueTest, Priorities) {
  std::string order;
  Gate gate;
  CopyQueue queue({.chunk_bytes = 1, .copy = [&](std::span<const CopySegment> segments) {
                     const char name = *static_cast<const char*>(segments[0].src);
                     if (name == 'a' && order.empty()) gate.pass();
                     order += name;
                   }});
  const std::string names = "aaabbbcccddd";
  Bytes dst(names.size());
  const auto segment = [&](int first) {
    return Segments{{names.data() + first, dst.data() + first, 3}};
  };
  std::vector<CopyJob> jobs{queue.submit(segment(0), 5)};
  gate.await(1);  // its first chunk is under way
  jobs.push_back(queue.submit(segment(3), 5));
  jobs.push_back(queue.submit(segment(6), -1));
  jobs.push_back(queue.submit(segment(9), 7));
  gate.open();
  for (const CopyJob& job : jobs) EXPECT_TRUE(job.wait());
  EXPECT_EQ(order, "acccaabbbddd");
}

TEST(CopyQueueTest, CancelWaitsForWhatIsUnderWay) {
  const Bytes src = test::make_bytes(30, 1);
  Bytes dst(30);
  Gate gate;
  CopyQueue queue({.chunk_bytes = 10, .copy = [&](std::span<const CopySegment> segments) {
                     gate.pass();
                     copy_now(segments);
                   }});
  const CopyJob running = queue.submit({{src.data(), dst.data(), 20}});
  const CopyJob waiting = queue.submit({{src.data() + 20, dst.data() + 20, 10}});
  gate.await(1);
  waiting.cancel();
  EXPECT_EQ(waiting.state(), CopyState::kCancelled);
  EXPECT_FALSE(waiting.wait());
  std::atomic<bool> is_cancelled = false;
  std::thread other([&] {
    running.cancel();
    is_cancelled = true;
  });
  while (queue.stats().bytes_queued > 10) std::this_thread::yield();  // the rest is dropped
  EXPECT_FALSE(is_cancelled);
  EXPECT_EQ(running.state(), CopyState::kPending);
  gate.open();
  other.join();
  EXPECT_EQ(running.state(), CopyState::kCancelled);
  EXPECT_TRUE(running.wait(1)) << "the first chunk was copied all the same";
  EXPECT_FALSE(running.wait());
  running.cancel();
  EXPECT_EQ(queue.stats().jobs_cancelled, 2);
  EXPECT_EQ(queue.stats().bytes_queued, 0);
  EXPECT_EQ(dst[20], 0);
}

TEST(CopyQueueTest, AFailureIsTheJobsAlone) {
  const Bytes src = test::make_bytes(30, 1);
  Bytes dst(30);
  CopyQueue queue({.chunk_bytes = 10, .copy = [&](std::span<const CopySegment> segments) {
                     if (segments[0].src == src.data() + 10) throw DeviceError("link lost");
                     copy_now(segments);
                   }});
  const CopyJob bad = queue.submit({{src.data(), dst.data(), 30}});
  const CopyJob good = queue.submit({{src.data() + 20, dst.data() + 20, 10}});
  EXPECT_TRUE(good.wait());
  try {
    bad.wait();
    FAIL() << "expected an error";
  } catch (const DeviceError& error) {
    EXPECT_STREQ(error.what(), "copy failed: link lost");
  }
  EXPECT_TRUE(bad.wait(1));
  EXPECT_THROW(bad.wait_on_stream(nullptr), DeviceError);
  EXPECT_EQ(bad.state(), CopyState::kFailed);
  EXPECT_EQ(bad.num_done(), 1);
  EXPECT_EQ(queue.stats().jobs_failed, 1);
  EXPECT_EQ(queue.stats().bytes_queued, 0);
}

TEST(CopyQueueTest, BackPressure) {
  const Bytes src = test::make_bytes(100, 1);
  Bytes dst(100);
  Gate gate;
  CopyQueue queue({.chunk_bytes = 10,
                   .max_bytes_in_flight = 15,
                   .max_bytes_queued = 50,
                   .num_threads = 3,
                   .copy = [&](std::span<const CopySegment> segments) {
                     gate.pass();
                     copy_now(segments);
                   }});
  const auto segments = [&](int first, int bytes) {
    return Segments{{src.data() + first, dst.data() + first, bytes}};
  };
  const CopyJob first = queue.submit(segments(0, 60));  // the only one: more than the bound
  gate.await(1);
  EXPECT_FALSE(queue.try_submit(segments(60, 10)));
  EXPECT_EQ(queue.stats().bytes_in_flight, 10);
  std::thread other([&] { EXPECT_TRUE(queue.submit(segments(60, 40)).wait()); });
  gate.open();
  EXPECT_TRUE(first.wait());
  other.join();
  EXPECT_EQ(src, dst);
  EXPECT_EQ(queue.stats().most_in_flight, 10);
}

TEST(CopyQueueTest, DestructionCancels) {
  const Bytes src = test::make_bytes(30, 1);
  Bytes dst(30);
  Gate gate;
  CopyJob running, waiting;
  {
    CopyQueue queue({.chunk_bytes = 10, .copy = [&](std::span<const CopySegment> segments) {
                       gate.pass();
                       copy_now(segments);
                     }});
    running = queue.submit({{src.data(), dst.data(), 20}});
    waiting = queue.submit({{src.data() + 20, dst.data() + 20, 10}});
    gate.await(1);
    gate.open();
  }
  EXPECT_NE(running.state(), CopyState::kPending);
  EXPECT_NE(waiting.state(), CopyState::kPending);
  EXPECT_TRUE(running.wait(1));
}

// A link of a fixed speed: what is copied meanwhile does not wait for it.
TEST(CopyQueueTest, SlowedDown) {
  const Bytes src = test::make_bytes(1000, 1);
  Bytes dst(1000);
  CopyQueue queue({.chunk_bytes = 100, .bytes_per_second = 100'000});
  const CopyJob job = queue.submit({{src.data(), dst.data(), 1000}});
  EXPECT_TRUE(job.wait(1));
  EXPECT_TRUE(std::equal(src.begin(), src.begin() + 100, dst.begin()));
  EXPECT_TRUE(job.wait());
  EXPECT_EQ(src, dst);
}

// Submitting, waiting, cancelling and failing from many threads at once.
TEST(CopyQueueTest, ManyThreads) {
  const Bytes src = test::make_bytes(2000, 3);
  std::atomic<int> countdown = 97;
  CopyQueue queue({.chunk_bytes = 64,
                   .max_bytes_in_flight = 256,
                   .max_bytes_queued = 4000,
                   .num_threads = 2,
                   .copy = [&](std::span<const CopySegment> segments) {
                     if (--countdown == 0) {
                       countdown = 97;
                       throw std::runtime_error("now and then");
                     }
                     copy_now(segments);
                   }});
  std::atomic<int> num_copied = 0, num_other = 0;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int round = 0; round < 40; ++round) {
        Bytes dst(src.size());
        const CopyJob job =
            queue.submit(scattered(src, dst, random), static_cast<int>(random() % 3));
        if (random() % 4 == 0) job.cancel();
        try {
          if (job.wait()) {
            EXPECT_EQ(dst, src);
            ++num_copied;
          } else {
            ++num_other;
          }
        } catch (const DeviceError&) {
          ++num_other;
        }
        EXPECT_NE(job.state(), CopyState::kPending);  // or dst may not be freed
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const CopyQueueStats stats = queue.stats();
  EXPECT_EQ(stats.jobs_done, num_copied);
  EXPECT_EQ(stats.jobs_failed + stats.jobs_cancelled, num_other);
  EXPECT_EQ(num_copied + num_other, 160);
  EXPECT_EQ(stats.bytes_queued, 0);
}

TEST(CopyQueueTest, EmptyJobsAndErrors) {
  CopyQueue queue({});
  const CopyJob job = queue.submit({});
  EXPECT_TRUE(job.wait());
  EXPECT_EQ(job.num_chunks(), 0);
  EXPECT_THROW(CopyQueue({.chunk_bytes = 0}), ArgumentError);
  EXPECT_THROW(CopyQueue({.num_threads = 0}), ArgumentError);
  EXPECT_THROW(CopyQueue({.bytes_per_second = -1}), ArgumentError);
  EXPECT_THROW(CopyQueue({.device = {DeviceType::kOther, 0}}), ArgumentError);
}

TEST(PageLockTest, NeedsADevice) {
  if (cuda_device_count() > 0) {
    Bytes bytes(1 << 16);
    PageLock lock(bytes.data(), 1 << 16);
    EXPECT_THROW(PageLock(bytes.data(), 1 << 16), DeviceError) << "locked already";
  } else {
    EXPECT_THROW(PageLock(nullptr, 1), DeviceError);
  }
}

TEST(CopyPiecesTest, ContiguousMemoryIsOnePiece) {
  Bytes bytes(4 * 3 * 2 * 8);
  const TensorView nhd = make_view(bytes.data(), kFloat32, {4, 3, 2, 2});
  std::vector<CopyPiece> pieces;
  append_pieces(test::transpose(nhd, 1, 2), pieces);
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(pieces[0].bytes, static_cast<std::int64_t>(bytes.size()));
  pieces.clear();
  append_block_pieces(nhd, "k", std::vector<std::int64_t>{2, 3, 1}, pieces);
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].data, nhd.as<char>() + 2 * 48);
  EXPECT_EQ(pieces[0].bytes, 96);
  EXPECT_EQ(pieces[1].bytes, 48);
  EXPECT_THROW(append_block_pieces(nhd, "k", std::vector<std::int64_t>{4}, pieces), ArgumentError);
}

TEST(CopyPiecesTest, StridedBlocksThereAndBack) {
  const Bytes fused_bytes = test::make_bytes(5 * 3 * 2 * 8, 7);
  Bytes pool = fused_bytes;
  TensorView keys = make_view(pool.data(), DType{TypeCode::kUInt, 8}, {5, 3, 2, 8});
  keys.shape[3] = 5;  // the first part of each row
  const std::vector<std::int64_t> blocks{4, 0};
  std::vector<CopyPiece> in_pool, flat;
  append_block_pieces(keys, "keys", blocks, in_pool);
  EXPECT_EQ(in_pool.size(), 2u * 3 * 2);
  Bytes host(2 * 3 * 2 * 5);
  flat.push_back({reinterpret_cast<char*>(host.data()), 7});
  flat.push_back({reinterpret_cast<char*>(host.data()) + 7, 53});
  CopyQueue queue({});
  EXPECT_TRUE(queue.submit(pair_pieces(in_pool, flat)).wait());
  EXPECT_EQ(host[5], fused_bytes[4 * 48 + 8]);
  for (std::size_t i = 0; i < pool.size(); ++i) {
    if (i % 8 < 5 && (i / 48 == 4 || i / 48 == 0)) pool[i] = 0;
  }
  EXPECT_TRUE(queue.submit(pair_pieces(flat, in_pool)).wait());
  EXPECT_EQ(pool, fused_bytes);
  flat.pop_back();
  EXPECT_THROW(pair_pieces(in_pool, flat), ArgumentError);
}

TEST(CopySegmentsKernelTest, AnyAlignmentAndNumber) {
  std::mt19937 random(1);
  for (const int count : {1, 7, 161}) {
    const Bytes src = test::make_bytes(40'000, 5);
    Bytes dst(src.size(), 0), expected(src.size(), 0);
    Segments segments;
    std::size_t at = 0;
    for (int i = 0; i < count; ++i) {
      const std::size_t bytes = random() % 200;
      at += random() % 3 == 0 ? (16 - at % 16) : random() % 16;
      segments.push_back({src.data() + at, dst.data() + at, static_cast<std::int64_t>(bytes)});
      std::copy_n(src.begin() + static_cast<std::ptrdiff_t>(at), bytes,
                  expected.begin() + static_cast<std::ptrdiff_t>(at));
      at += bytes;
    }
    cuda::launch_copy_segments(segments, cuda::HostLauncher{8});
    EXPECT_EQ(dst, expected);
  }
}

}  // namespace
}  // namespace kvspan
