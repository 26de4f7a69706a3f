#include <cuda_runtime.h>

#include <atomic>
#include <vector>

#include "copier.h"
#include "copy_segments.cuh"
#include "runtime.cuh"

namespace kvspan::cuda {
namespace {

using copy_impl::Event;

// cudaMemcpyBatchAsync came with CUDA 12.8; CUDA 13 dropped an argument.
#if CUDART_VERSION >= 12080
constexpr bool kHasBatchedCopy = true;

cudaError_t copy_batch(std::span<const CopySegment> segments, cudaStream_t stream) {
  std::vector<void*> dsts;
  std::vector<const void*> srcs;
  std::vector<std::size_t> sizes;
  for (const CopySegment& segment : segments) {
    dsts.push_back(segment.dst);
    srcs.push_back(segment.src);
    sizes.push_back(static_cast<std::size_t>(segment.bytes));
  }
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  std::size_t first = 0;
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(dsts.data(), srcs.data(), sizes.data(), segments.size(), &attributes,
                              &first, 1, stream);
#else
  std::vector<void*> sources;
  for (const void* src : srcs) sources.push_back(const_cast<void*>(src));
  std::size_t failed = 0;
  return cudaMemcpyBatchAsync(dsts.data(), sources.data(), sizes.data(), segments.size(),
                              &attributes, &first, 1, &failed, stream);
#endif
}
#else
constexpr bool kHasBatchedCopy = false;

cudaError_t copy_batch(std::span<const CopySegment>, cudaStream_t) { return cudaErrorNotSupported; }
#endif

// What a queue does in the background must not stop another thread's capture of a graph, nor be
// stopped by it: it concerns no stream of the capture.
class CaptureGuard {
 public:
  CaptureGuard() { exchange(); }
  ~CaptureGuard() { exchange(); }
  CaptureGuard(const CaptureGuard&) = delete;
  CaptureGuard& operator=(const CaptureGuard&) = delete;

 private:
  void exchange() { cudaThreadExchangeStreamCaptureMode(&mode_); }

  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeThreadLocal;
};

// Memory of the host that the device cannot read.
bool is_pageable(const void* data) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes");
  return attributes.type == cudaMemoryTypeUnregistered;
}

bool is_unsupported(cudaError_t error) {
  return error == cudaErrorNotSupported || error == cudaErrorCallRequiresNewerDriver;
}

class CudaCopier : public copy_impl::Copier {
 public:
  explicit CudaCopier(int device) : device_(device) {
    const DeviceGuard guard(device_);
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
               "cudaStreamCreateWithFlags");
  }

  ~CudaCopier() override { cudaStreamDestroy(stream_); }

  Event mark(void* stream) override {
    const DeviceGuard guard(device_);
    return record(static_cast<cudaStream_t>(stream));
  }

  Event issue(std::span<const CopySegment> segments, const Event& after) override {
    const CaptureGuard capture;
    const DeviceGuard guard(device_);
    try {
      if (after) {
        check_cuda(cudaStreamWaitEvent(stream_, static_cast<cudaEvent_t>(after.get()), 0),
                   "cudaStreamWaitEvent");
      }
      copy(segments);
      return record(stream_);
    } catch (...) {
      cudaStreamSynchronize(stream_);  // part of it may be under way
      throw;
    }
  }

  void wait(const Event& event) override {
    const CaptureGuard capture;
    const DeviceGuard guard(device_);
    check_cuda(cudaEventSynchronize(static_cast<cudaEvent_t>(event.get())), "cudaEventSynchronize");
  }

  void wait_on_stream(const Event& event, void* stream) override {
    const DeviceGuard guard(device_);
    check_cuda(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream),
                                   static_cast<cudaEvent_t>(event.get()), 0),
               "cudaStreamWaitEvent");
  }

 private:
  void copy(std::span<const CopySegment> segments) {
    if (has_batched_copy_) {
      const cudaError_t error = copy_batch(segments, stream_);
      if (!is_unsupported(error)) return check_cuda(error, "cudaMemcpyBatchAsync");
      cudaGetLastError();
      has_batched_copy_ = false;  // an older driver than the toolkit
    }
    std::vector<CopySegment> by_kernel;
    for (const CopySegment& segment : segments) {
      if (is_pageable(segment.src) || is_pageable(segment.dst)) {
        check_cuda(
            cudaMemcpyAsync(segment.dst, segment.src, static_cast<std::size_t>(segment.bytes),
                            cudaMemcpyDefault, stream_),
            "cudaMemcpyAsync");
      } else {
        by_kernel.push_back(segment);
      }
    }
    launch_copy_segments(by_kernel, StreamLauncher{stream_});
  }

  static Event record(cudaStream_t stream) {
    cudaEvent_t created = nullptr;
    // Blocking: the queue's thread sleeps while it waits.
    check_cuda(cudaEventCreateWithFlags(&created, cudaEventDisableTiming | cudaEventBlockingSync),
               "cudaEventCreateWithFlags");
    Event event(created, [](void* e) { cudaEventDestroy(static_cast<cudaEvent_t>(e)); });
    check_cuda(cudaEventRecord(created, stream), "cudaEventRecord");
    return event;
  }

  const int device_;
  cudaStream_t stream_ = nullptr;
  std::atomic<bool> has_batched_copy_ = kHasBatchedCopy;
};

}  // namespace

std::unique_ptr<copy_impl::Copier> make_copier(const CopyQueueOptions& options) {
  return std::make_unique<CudaCopier>(options.device.index);
}

// Portable: locked for every device of the process.
void lock_pages(void* data, std::int64_t bytes) {
  check_cuda(cudaHostRegister(data, static_cast<std::size_t>(bytes), cudaHostRegisterPortable),
             "cudaHostRegister");
}

void unlock_pages(void* data) noexcept {
  cudaHostUnregister(data);
  cudaGetLastError();
}

}  // namespace kvspan::cuda
