// The CUDA runtime as kvspan uses it: errors as exceptions, the current device put back.
#pragma once

#include <cuda_runtime.h>

#include "kvspan/check.h"

namespace kvspan::cuda {

inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw DeviceError(concat("CUDA error in ", call, ": ", cudaGetErrorName(error), " (",
                           static_cast<int>(error), "), ", cudaGetErrorString(error)));
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device != previous_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = device != previous_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// A launcher for the launch_* functions of the kernel headers.
struct StreamLauncher {
  cudaStream_t stream;

  template <typename Args>
  void operator()(void (*kernel)(Args), unsigned grid_x, unsigned grid_y, const Args& args) const {
    kernel<<<dim3(grid_x, grid_y), kThreadsPerBlock, 0, stream>>>(args);
    check_cuda(cudaGetLastError(), "kernel launch");
  }
};

}  // namespace kvspan::cuda
