#include "kvspan/copy_queue.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "copier.h"
#include "kvspan/check.h"
#include "kvspan/device.h"

namespace kvspan {
namespace copy_impl {

struct Chunk {
  std::size_t begin, end;  // in Job::segments
  std::int64_t bytes;
  bool is_issued = false;
  bool is_done = false;
  Event event = nullptr;
};

// All but the constant part is guarded by Shared::mutex.
struct Job {
  std::vector<CopySegment> segments;  // none longer than a chunk
  std::vector<Chunk> chunks;
  std::pair<int, std::int64_t> order;  // priority, then who came first
  Event after;

  std::size_t next_chunk = 0;  // to be issued
  std::size_t num_done = 0;    // the first ones, without a gap
  std::int64_t bytes_done = 0;
  int num_running = 0;
  bool is_counted = false;
  CopyState outcome = CopyState::kPending;
  std::string error;

  bool is_settled() const { return outcome != CopyState::kPending && num_running == 0; }
};

namespace {

// Cuts segments into chunks of at most chunk_bytes.
void cut(std::vector<CopySegment> segments, std::int64_t chunk_bytes, Job& job) {
  std::int64_t room = 0;
  for (CopySegment segment : segments) {
    while (segment.bytes > 0) {
      if (room == 0) {
        job.chunks.push_back({job.segments.size(), job.segments.size(), 0});
        room = chunk_bytes;
      }
      const std::int64_t bytes = std::min(segment.bytes, room);
      job.segments.push_back({segment.src, segment.dst, bytes});
      segment.src = static_cast<const char*>(segment.src) + bytes;
      segment.dst = static_cast<char*>(segment.dst) + bytes;
      segment.bytes -= bytes;
      room -= bytes;
      job.chunks.back().end = job.segments.size();
      job.chunks.back().bytes += bytes;
    }
  }
}

}  // namespace

struct Shared {
  CopyQueueOptions options;
  std::unique_ptr<Copier> copier;
  mutable std::mutex mutex;
  std::condition_variable work;      // for workers
  std::condition_variable progress;  // for those who wait for jobs, or for room
  std::map<std::pair<int, std::int64_t>, std::shared_ptr<Job>> ready;  // with chunks to be issued
  std::int64_t num_submitted = 0;
  bool is_stopping = false;
  CopyQueueStats stats;
  std::vector<std::thread> workers;

  // With the lock held.

  bool has_room(std::int64_t bytes) const {
    return stats.bytes_queued == 0 || stats.bytes_queued + bytes <= options.max_bytes_queued;
  }

  // The job whose next chunk may be issued, or null.
  std::shared_ptr<Job> pick() const {
    if (ready.empty()) return nullptr;
    const auto& job = ready.begin()->second;
    const std::int64_t bytes = job->chunks[job->next_chunk].bytes;
    const bool fits =
        stats.bytes_in_flight == 0 || stats.bytes_in_flight + bytes <= options.max_bytes_in_flight;
    return fits ? job : nullptr;
  }

  // Issues no more of a job.
  void drop_rest(Job& job, CopyState outcome) {
    if (job.outcome != CopyState::kPending) return;
    job.outcome = outcome;
    for (; job.next_chunk < job.chunks.size(); ++job.next_chunk) {
      stats.bytes_queued -= job.chunks[job.next_chunk].bytes;
    }
    ready.erase(job.order);
    settle(job);
  }

  void settle(Job& job) {
    if (!job.is_settled() || std::exchange(job.is_counted, true)) return;
    ++(job.outcome == CopyState::kDone     ? stats.jobs_done
       : job.outcome == CopyState::kFailed ? stats.jobs_failed
                                           : stats.jobs_cancelled);
    job.after = nullptr;
    job.segments = {};
    progress.notify_all();
  }

  void finish(Job& job, std::size_t index, const std::string* error) {
    Chunk& chunk = job.chunks[index];
    stats.bytes_in_flight -= chunk.bytes;
    stats.bytes_queued -= chunk.bytes;
    --job.num_running;
    if (error) {
      if (job.outcome == CopyState::kPending) job.error = *error;
      drop_rest(job, CopyState::kFailed);
    } else {
      chunk.is_done = true;
      stats.bytes_done += chunk.bytes;
      while (job.num_done < job.chunks.size() && job.chunks[job.num_done].is_done) {
        job.bytes_done += job.chunks[job.num_done++].bytes;
      }
      if (job.num_done == job.chunks.size() && job.outcome == CopyState::kPending) {
        job.outcome = CopyState::kDone;
      }
    }
    settle(job);
    progress.notify_all();
    work.notify_all();
  }

  // A worker: issues chunks while they fit, and else waits for the oldest that it has issued.
  void run() {
    struct Issued {
      std::shared_ptr<Job> job;
      std::size_t chunk;
      Event event;
    };
    std::deque<Issued> issued;
    std::unique_lock lock(mutex);
    // Calls the copier without the lock; the reason where it fails.
    const auto unlocked = [&](const auto& call) -> std::optional<std::string> {
      std::optional<std::string> error;
      lock.unlock();
      try {
        call();
      } catch (const std::exception& e) {
        error = e.what();
      } catch (...) {
        error = "unknown error";
      }
      lock.lock();
      return error;
    };
    while (true) {
      if (const std::shared_ptr<Job> job = pick()) {
        const std::size_t index = job->next_chunk++;
        if (job->next_chunk == job->chunks.size()) ready.erase(job->order);
        ++job->num_running;
        const Chunk& chunk = job->chunks[index];
        stats.bytes_in_flight += chunk.bytes;
        stats.most_in_flight = std::max(stats.most_in_flight, stats.bytes_in_flight);
        const std::span segments(job->segments.data() + chunk.begin, chunk.end - chunk.begin);
        const Event after = job->after;
        Event event;
        const auto error = unlocked([&] { event = copier->issue(segments, after); });
        if (error || !event) {
          finish(*job, index, error ? &*error : nullptr);
          continue;
        }
        job->chunks[index].event = event;
        job->chunks[index].is_issued = true;
        progress.notify_all();
        issued.push_back({job, index, std::move(event)});
      } else if (!issued.empty()) {
        const Issued oldest = std::move(issued.front());
        issued.pop_front();
        const auto error = unlocked([&] { copier->wait(oldest.event); });
        finish(*oldest.job, oldest.chunk, error ? &*error : nullptr);
      } else if (is_stopping) {
        return;
      } else {
        work.wait(lock);
      }
    }
  }
};

}  // namespace copy_impl

using copy_impl::Job;
using copy_impl::Shared;

CopyState CopyJob::state() const {
  const std::lock_guard lock(shared_->mutex);
  return job_->is_settled() ? job_->outcome : CopyState::kPending;
}

std::int64_t CopyJob::num_chunks() const { return static_cast<std::int64_t>(job_->chunks.size()); }

std::int64_t CopyJob::num_done() const {
  const std::lock_guard lock(shared_->mutex);
  return static_cast<std::int64_t>(job_->num_done);
}

std::int64_t CopyJob::bytes_done() const {
  const std::lock_guard lock(shared_->mutex);
  return job_->bytes_done;
}

bool CopyJob::wait(std::int64_t num_chunks) const {
  while (true) {
    if (const auto answer = wait_for(3600, num_chunks)) return *answer;
  }
}

std::optional<bool> CopyJob::wait_for(double seconds, std::int64_t num_chunks) const {
  KVSPAN_CHECK_ARG(num_chunks >= -1 && num_chunks <= this->num_chunks(),
                   "num_chunks: expected -1 to ", this->num_chunks(), ", got ", num_chunks);
  std::unique_lock lock(shared_->mutex);
  const auto is_copied = [&] {
    return num_chunks >= 0 ? static_cast<std::int64_t>(job_->num_done) >= num_chunks
                           : job_->is_settled() && job_->outcome == CopyState::kDone;
  };
  // A wait until a point in time of the system's clock is what thread sanitizers know.
  const auto end = std::chrono::system_clock::now() +
                   std::chrono::duration_cast<std::chrono::system_clock::duration>(
                       std::chrono::duration<double>(seconds));
  const bool in_time =
      shared_->progress.wait_until(lock, end, [&] { return is_copied() || job_->is_settled(); });
  if (!in_time) return std::nullopt;
  if (is_copied()) return true;
  KVSPAN_CHECK(job_->outcome != CopyState::kFailed, DeviceError, "copy failed: ", job_->error);
  return false;
}

bool CopyJob::wait_on_stream(void* stream, std::int64_t num_chunks) const {
  if (shared_->options.device.type == DeviceType::kCpu) return wait(num_chunks);
  KVSPAN_CHECK_ARG(num_chunks >= -1 && num_chunks <= this->num_chunks(),
                   "num_chunks: expected -1 to ", this->num_chunks(), ", got ", num_chunks);
  const std::size_t wanted =
      num_chunks < 0 ? job_->chunks.size() : static_cast<std::size_t>(num_chunks);
  if (wanted == 0) return true;
  // Chunks are issued in order on one stream: the last one's event comes after the others'.
  const copy_impl::Chunk& last = job_->chunks[wanted - 1];
  std::unique_lock lock(shared_->mutex);
  shared_->progress.wait(lock, [&] { return last.is_issued || job_->is_settled(); });
  KVSPAN_CHECK(job_->outcome != CopyState::kFailed, DeviceError, "copy failed: ", job_->error);
  if (!last.is_issued) return false;
  const copy_impl::Event event = last.event;
  lock.unlock();
  shared_->copier->wait_on_stream(event, stream);
  return true;
}

void CopyJob::cancel() const {
  std::unique_lock lock(shared_->mutex);
  shared_->drop_rest(*job_, CopyState::kCancelled);
  shared_->progress.notify_all();  // there is room
  shared_->work.notify_all();
  shared_->progress.wait(lock, [&] { return job_->is_settled(); });
}

CopyQueue::CopyQueue(CopyQueueOptions options) : shared_(std::make_shared<Shared>()) {
  for (const auto& [value, name] : {std::pair{options.chunk_bytes, "chunk_bytes"},
                                    std::pair{options.max_bytes_in_flight, "max_bytes_in_flight"},
                                    std::pair{options.max_bytes_queued, "max_bytes_queued"},
                                    std::pair{std::int64_t{options.num_threads}, "num_threads"}}) {
    KVSPAN_CHECK_ARG(value >= 1, name, ": expected 1 or more, got ", value);
  }
  KVSPAN_CHECK_ARG(options.bytes_per_second >= 0, "bytes_per_second: expected 0 or more, got ",
                   options.bytes_per_second);
  const bool on_cuda = options.device.type == DeviceType::kCuda;
  KVSPAN_CHECK_ARG(on_cuda || options.device.type == DeviceType::kCpu,
                   "device: expected cpu or cuda, got ", to_string(options.device));
  if (on_cuda) require_cuda();
  shared_->copier = on_cuda ? cuda::make_copier(options) : copy_impl::make_cpu_copier(options);
  const int num_workers = on_cuda ? 1 : options.num_threads;
  shared_->options = std::move(options);
  for (int i = 0; i < num_workers; ++i) {
    shared_->workers.emplace_back([shared = shared_.get()] { shared->run(); });
  }
}

CopyQueue::~CopyQueue() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->is_stopping = true;
    while (!shared_->ready.empty()) {
      const std::shared_ptr<Job> job = shared_->ready.begin()->second;
      shared_->drop_rest(*job, CopyState::kCancelled);
    }
    shared_->work.notify_all();
  }
  for (std::thread& worker : shared_->workers) worker.join();
}

CopyJob CopyQueue::submit(std::vector<CopySegment> segments, int priority, void* after) {
  std::int64_t bytes = 0;
  for (const CopySegment& segment : segments) bytes += segment.bytes;
  while (true) {
    if (auto job = try_submit(segments, priority, after)) return *job;
    std::unique_lock lock(shared_->mutex);
    shared_->progress.wait(lock, [&] { return shared_->has_room(bytes); });
  }
}

std::optional<CopyJob> CopyQueue::try_submit(std::vector<CopySegment> segments, int priority,
                                             void* after) {
  auto job = std::make_shared<Job>();
  copy_impl::cut(std::move(segments), shared_->options.chunk_bytes, *job);
  std::int64_t bytes = 0;
  for (const copy_impl::Chunk& chunk : job->chunks) bytes += chunk.bytes;
  if (after) job->after = shared_->copier->mark(after);
  const std::lock_guard lock(shared_->mutex);
  if (!shared_->has_room(bytes)) return std::nullopt;
  job->order = {priority, shared_->num_submitted++};
  if (job->chunks.empty()) {
    job->outcome = CopyState::kDone;
    shared_->settle(*job);
  } else {
    shared_->stats.bytes_queued += bytes;
    shared_->ready.emplace(job->order, job);
    shared_->work.notify_all();
  }
  return CopyJob(shared_, std::move(job));
}

PageLock::PageLock(void* data, std::int64_t bytes) : data_(data) {
  require_cuda();
  cuda::lock_pages(data, bytes);
}

PageLock::~PageLock() { cuda::unlock_pages(data_); }

CopyQueueStats CopyQueue::stats() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->stats;
}

}  // namespace kvspan
