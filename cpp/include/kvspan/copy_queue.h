// Copies many pieces of memory in the background: cached blocks between pools of the host and of a
// device, or of the host alone.
//
// A job is a list of segments, cut into chunks of about chunk_bytes that are copied in order. Each
// chunk has its event, so that work on the first blocks of a job starts while the rest is under
// way. Of several jobs the one with the lowest priority number goes first, between chunks: submit
// what is waited for first (the hidden vectors of a tail) with a lower one. Bytes in flight are
// bounded, so that a job that comes later and is urgent waits for few of those before it, and bytes
// queued are bounded, so that a slow device is felt by who submits.
//
// On CUDA a chunk is one submission on the queue's own stream: cudaMemcpyBatchAsync where toolkit
// and driver have it, else a kernel that reads and writes page-locked memory (copy_segments.cuh).
// On the CPU worker threads copy, and everything else is the same.
//
// Whatever happens to a job (done, failed, cancelled), once it is settled no byte of its memory is
// touched any more and the queue holds nothing of it. Destroying the queue cancels what is left.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvspan/tensor_view.h"

namespace kvspan {

struct CopySegment {
  const void* src;
  void* dst;
  std::int64_t bytes;
};

struct CopyPiece {
  char* data;
  std::int64_t bytes;
};

// A tensor's memory, element after element in the order of its strides, the longest first, as few
// pieces. Of the same pool it is always the same order. Any shape and strides.
void append_pieces(const TensorView& tensor, std::vector<CopyPiece>& pieces);

// The same for blocks of a pool, [num_blocks, ...], one block after the other. name is the
// argument's, for messages. Throws ArgumentError for a block that is not there.
void append_block_pieces(const TensorView& pool, const ArgName& name,
                         std::span<const std::int64_t> blocks, std::vector<CopyPiece>& pieces);

// Segments that copy the bytes of src, in order, to those of dst. Throws ArgumentError unless both
// have as many.
std::vector<CopySegment> pair_pieces(std::span<const CopyPiece> src,
                                     std::span<const CopyPiece> dst);

struct CopyQueueOptions {
  Device device = {};  // of one side of the copies at least; cpu for the host alone
  std::int64_t chunk_bytes = std::int64_t{1} << 22;
  std::int64_t max_bytes_in_flight = std::int64_t{1}
                                     << 25;               // at least one chunk is, whatever it is
  std::int64_t max_bytes_queued = std::int64_t{1} << 30;  // at least one job is
  int num_threads = 1;                                    // CPU only
  // CPU only, for rehearsals: each thread is slowed down to this; 0 for no limit.
  double bytes_per_second = 0;
  // CPU only, for tests: copies instead of memcpy; what it throws fails the job.
  std::function<void(std::span<const CopySegment>)> copy = {};
};

enum class CopyState : std::uint8_t { kPending, kDone, kFailed, kCancelled };

namespace copy_impl {
struct Job;
struct Shared;
}  // namespace copy_impl

// A job that was submitted; copies of the handle are the same job. Outlives the queue.
class CopyJob {
 public:
  CopyJob() = default;
  CopyJob(std::shared_ptr<copy_impl::Shared> shared, std::shared_ptr<copy_impl::Job> job)
      : shared_(std::move(shared)), job_(std::move(job)) {}

  // kPending until the job is settled: until none of its chunks is under way, whatever the outcome.
  CopyState state() const;
  std::int64_t num_chunks() const;
  std::int64_t num_done() const;    // chunks: the first ones, without a gap
  std::int64_t bytes_done() const;  // that those have, the first ones of the segments

  // Waits until the first num_chunks chunks (-1: all, and settled) are copied. False if the job was
  // cancelled before. Throws DeviceError if it failed before, with the reason.
  bool wait(std::int64_t num_chunks = -1) const;
  // The same for at most that long; nothing if it was not enough.
  std::optional<bool> wait_for(double seconds, std::int64_t num_chunks = -1) const;
  // CUDA: what is enqueued on the stream from now on waits for these chunks; the host waits only
  // until they are enqueued themselves. CPU: like wait().
  bool wait_on_stream(void* stream, std::int64_t num_chunks = -1) const;

  // Copies no more chunks, and waits for those under way. Does nothing to a job that is settled.
  void cancel() const;

 private:
  std::shared_ptr<copy_impl::Shared> shared_;
  std::shared_ptr<copy_impl::Job> job_;
};

struct CopyQueueStats {
  std::int64_t jobs_done = 0, jobs_failed = 0, jobs_cancelled = 0;
  std::int64_t bytes_done = 0;
  std::int64_t bytes_queued = 0;     // now, those in flight included
  std::int64_t bytes_in_flight = 0;  // now
  std::int64_t most_in_flight = 0;   // ever
};

// Thread-safe.
class CopyQueue {
 public:
  // Throws ArgumentError; DeviceError where there is no such device.
  explicit CopyQueue(CopyQueueOptions options);
  ~CopyQueue();
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  // Segments do not overlap each other's destinations, and stay valid until the job is settled; on
  // CUDA those of the host are page-locked. after: CUDA, a cudaStream_t whose work so far the job
  // waits for (its producer's); null for none, and so not the legacy default stream. A job that
  // waits holds up those behind it in the queue: give stores to the host a queue of their own.
  // submit() waits for room, try_submit() gives nothing where there is none.
  CopyJob submit(std::vector<CopySegment> segments, int priority = 0, void* after = nullptr);
  std::optional<CopyJob> try_submit(std::vector<CopySegment> segments, int priority = 0,
                                    void* after = nullptr);

  CopyQueueStats stats() const;

 private:
  std::shared_ptr<copy_impl::Shared> shared_;
};

// Locks the pages of host memory, so that a CUDA device can copy to and from it in the background;
// as long as this lives. The memory outlives it, and is locked once at a time.
class PageLock {
 public:
  // Throws DeviceError where there is no CUDA device, or no more memory can be locked.
  PageLock(void* data, std::int64_t bytes);
  ~PageLock();
  PageLock(const PageLock&) = delete;
  PageLock& operator=(const PageLock&) = delete;

 private:
  void* const data_;
};

namespace cuda {
void lock_pages(void* data, std::int64_t bytes);
void unlock_pages(void* data) noexcept;
}  // namespace cuda

}  // namespace kvspan
