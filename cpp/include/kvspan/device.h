// What this build and this machine can run on.
#pragma once

namespace kvspan {

// Whether CUDA kernels are in this build.
bool built_with_cuda();

// The number of usable CUDA devices; 0 without CUDA in the build, without a driver, without a
// device. Never throws.
int cuda_device_count();

// Throws DeviceError with the reason unless a CUDA device can be used.
void require_cuda();

}  // namespace kvspan
