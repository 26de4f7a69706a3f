// How a copy queue's chunks are copied on one kind of device.
#pragma once

#include <memory>
#include <span>

#include "kvspan/copy_queue.h"

namespace kvspan::copy_impl {

// An event of the device; null where everything is done at once. Freed with its last owner.
using Event = std::shared_ptr<void>;

class Copier {
 public:
  virtual ~Copier() = default;
  // What is enqueued on a stream so far.
  virtual Event mark(void* stream) = 0;
  // Starts copying, after that event if any. On an error nothing is under way any more.
  virtual Event issue(std::span<const CopySegment> segments, const Event& after) = 0;
  virtual void wait(const Event& event) = 0;
  virtual void wait_on_stream(const Event& event, void* stream) = 0;
};

std::unique_ptr<Copier> make_cpu_copier(const CopyQueueOptions& options);

}  // namespace kvspan::copy_impl

namespace kvspan::cuda {

std::unique_ptr<copy_impl::Copier> make_copier(const CopyQueueOptions& options);

}  // namespace kvspan::cuda
