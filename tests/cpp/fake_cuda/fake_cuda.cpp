#include <cstring>
#include <future>
#include <memory>
#include <string_view>
#include <utility>

#include "cuda.h"
#include "cuda_runtime.h"

namespace {

thread_local int current_device = 0;  // as cudaSetDevice left it
thread_local int context = -1;        // of which device; -1: none
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

cudaError_t returned(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// The runtime makes the current device's context where there is none.
int device_in_use() {
  if (context < 0) context = current_device;
  fake_cuda::state().contexts.insert(context);
  return context;
}

CUresult get_context(CUcontext* current) {
  *current = reinterpret_cast<CUcontext>(static_cast<std::ptrdiff_t>(context) + 1);
  return CUDA_SUCCESS;
}

CUresult set_context(CUcontext current) {
  context = static_cast<int>(reinterpret_cast<std::ptrdiff_t>(current)) - 1;
  return CUDA_SUCCESS;
}

}  // namespace

struct FakeEvent {
  std::shared_ptr<std::promise<void>> promise = std::make_shared<std::promise<void>>();
  std::shared_future<void> done = promise->get_future().share();
};

FakeStream::FakeStream() : device(context) {
  thread_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !work_.empty() || is_stopping_; });
      if (work_.empty()) return;
      const std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  });
}

FakeStream::~FakeStream() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void FakeStream::enqueue(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  work_.push_back(std::move(work));
  changed_.notify_all();
}

void FakeStream::synchronize() {
  std::promise<void> done;
  enqueue([&] { done.set_value(); });
  done.get_future().wait();
}

namespace fake_cuda {

State& state() {
  static State state;
  return state;
}

void reset() {
  state() = {};
  current_device = 0;
  context = -1;
  last_error = cudaSuccess;
  mode = cudaStreamCaptureModeGlobal;
}

cudaStreamCaptureMode capture_mode() { return mode; }

}  // namespace fake_cuda

const char* cudaGetErrorName(cudaError_t) { return "cudaErrorFake"; }
const char* cudaGetErrorString(cudaError_t) { return "asked for by a test"; }

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaGetDevice(int* device) {
  *device = context < 0 ? current_device : context;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  current_device = context = device;
  fake_cuda::state().contexts.insert(device);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, int,
                                             cudaDriverEntryPointQueryResult* found) {
  *found = cudaDriverEntryPointSuccess;
  *function = std::string_view(name) == "cuCtxGetCurrent" ? reinterpret_cast<void*>(&get_context)
                                                          : reinterpret_cast<void*>(&set_context);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, int) {
  device_in_use();
  *stream = new FakeStream;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream->synchronize();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  stream->enqueue([done = event->done] { done.wait(); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, int) {
  device_in_use();
  *event = new FakeEvent;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (stream->device != device_in_use()) return returned(cudaErrorInvalidValue);
  stream->enqueue([promise = event->promise] { promise->set_value(); });
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  event->done.wait();
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  std::swap(mode, *other);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  attributes->type =
      fake_cuda::state().pageable.count(data) ? cudaMemoryTypeUnregistered : cudaMemoryTypeHost;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, std::size_t bytes, int,
                            cudaStream_t stream) {
  ++fake_cuda::state().num_copies;
  stream->enqueue([=] { std::memcpy(dst, src, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemcpyBatchAsync(void** dsts, const void** srcs, std::size_t* sizes,
                                 std::size_t count, cudaMemcpyAttributes*, std::size_t*,
                                 std::size_t, cudaStream_t stream) {
  fake_cuda::State& state = fake_cuda::state();
  ++state.num_batches;
  state.mode_of_batch = mode;
  if (state.batch_error != cudaSuccess) return returned(state.batch_error);
  if (stream->device != device_in_use()) return returned(cudaErrorInvalidValue);
  for (std::size_t i = 0; i < count; ++i) {
    stream->enqueue(
        [dst = dsts[i], src = srcs[i], bytes = sizes[i]] { std::memcpy(dst, src, bytes); });
  }
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** parameters, std::size_t,
                             cudaStream_t) {
  fake_cuda::state().launched(kernel, parameters);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void*, std::size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
