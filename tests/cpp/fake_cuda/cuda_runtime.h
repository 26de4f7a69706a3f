// As much of the CUDA runtime as kvspan's host code calls, on the CPU: two devices, streams that
// are threads, errors on request. For tests of what surrounds the kernels: order, devices, errors.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "host_shim.h"

#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorCallRequiresNewerDriver = 36,
  cudaErrorNotSupported = 801,
};
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault = 0, cudaStreamNonBlocking = 1, cudaHostRegisterPortable = 1 };
enum { cudaEventBlockingSync = 1, cudaEventDisableTiming = 2, cudaMemcpyDefault = 4 };
enum { cudaMemcpySrcAccessOrderStream = 1, cudaMemcpyFlagPreferOverlapWithCompute = 1 };
struct cudaPointerAttributes {
  cudaMemoryType type;
};
struct cudaMemcpyAttributes {
  int srcAccessOrder, flags;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// What is enqueued runs in order on the stream's own thread.
struct FakeStream {
  FakeStream();
  ~FakeStream();
  void enqueue(std::function<void()> work);
  void synchronize();

  int device;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool is_stopping_ = false;
  std::thread thread_;
};
using cudaStream_t = FakeStream*;

struct FakeEvent;
using cudaEvent_t = FakeEvent*;

namespace fake_cuda {

// What tests set and see; reset() before each.
struct State {
  cudaError_t batch_error = cudaSuccess;  // of cudaMemcpyBatchAsync
  std::set<const void*> pageable;
  std::function<void(const void* kernel, void** parameters)> launched;
  int num_batches = 0, num_copies = 0;
  std::set<int> contexts;  // devices that have one
  cudaStreamCaptureMode mode_of_batch = cudaStreamCaptureModeGlobal;
};
State& state();
void reset();
cudaStreamCaptureMode capture_mode();  // of this thread

}  // namespace fake_cuda

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             int flags, cudaDriverEntryPointQueryResult* found);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, int flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, int flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data);
cudaError_t cudaMemcpyAsync(void* dst, const void* src, std::size_t bytes, int kind,
                            cudaStream_t stream);
cudaError_t cudaMemcpyBatchAsync(void** dsts, const void** srcs, std::size_t* sizes,
                                 std::size_t count, cudaMemcpyAttributes* attributes,
                                 std::size_t* firsts, std::size_t num_attributes,
                                 cudaStream_t stream);
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** parameters,
                             std::size_t shared_bytes, cudaStream_t stream);
cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* data);
