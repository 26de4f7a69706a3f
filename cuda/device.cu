#include <cuda_runtime.h>

#include "kvspan/check.h"
#include "kvspan/device.h"

namespace kvspan {

bool built_with_cuda() { return true; }

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // a missing driver must not show up as a later call's error
  return 0;
}

void require_cuda() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw DeviceError(concat("no CUDA device: ", cudaGetErrorString(error)));
  }
  if (count == 0) throw DeviceError("no CUDA device: the driver reports none");
}

}  // namespace kvspan
