// The CUDA runtime as kvspan uses it: errors as exceptions, the current device put back.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "common.cuh"
#include "kvspan/check.h"

namespace kvspan::cuda {

inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // told here, and not again by whoever asks for the last error
  throw DeviceError(concat("CUDA error in ", call, ": ", cudaGetErrorName(error), " (",
                           static_cast<int>(error), "), ", cudaGetErrorString(error)));
}

// A function of the driver, which is not linked: it is missing where no device is. The version is
// that of its type here.
template <typename Function>
Function* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  check_cuda(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found),
             "cudaGetDriverEntryPointByVersion");
#else
  check_cuda(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found),
             "cudaGetDriverEntryPoint");
#endif
  KVSPAN_CHECK(found == cudaDriverEntryPointSuccess, DeviceError, "the CUDA driver has no ", name);
  return reinterpret_cast<Function*>(function);
}

// Makes a device current, and then again what was: a context, or none. cudaSetDevice(previous)
// would make a context, hundreds of MB, on device 0 for a thread that has used no device yet.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    int current = 0;
    check_cuda(cudaGetDevice(&current), "cudaGetDevice");
    if (device == current) return;
    static const auto get_context = driver_function<CUresult(CUcontext*)>("cuCtxGetCurrent");
    const CUresult result = get_context(&previous_);
    KVSPAN_CHECK(result == CUDA_SUCCESS, DeviceError, "CUDA error ", static_cast<int>(result),
                 " in cuCtxGetCurrent");
    set_context_ = set_context();
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (set_context_) set_context_(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  using SetContext = CUresult(CUcontext);

  static SetContext* set_context() {
    static SetContext* const function = driver_function<SetContext>("cuCtxSetCurrent");
    return function;
  }

  CUcontext previous_ = nullptr;
  SetContext* set_context_ = nullptr;
};

// A launcher for the launch_* functions of the kernel headers. Errors are the launch's own: the
// last error of the runtime may be another call's.
struct StreamLauncher {
  cudaStream_t stream;

  template <typename Args>
  void operator()(void (*kernel)(Args), unsigned grid_x, unsigned grid_y, const Args& args,
                  int shared_bytes = 0) const {
    void* parameters[] = {const_cast<Args*>(&args)};
    check_cuda(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(grid_x, grid_y),
                                dim3(kThreadsPerBlock), parameters,
                                static_cast<std::size_t>(shared_bytes), stream),
               "kernel launch");
  }
};

}  // namespace kvspan::cuda
