#include <cuda_runtime.h>

#include "rerope_kernel.cuh"
#include "runtime.cuh"

namespace kvspan::cuda {

void rerope(const ReropeArgs& args) {
  const DeviceGuard guard(args.k_src.device.index);
  launch_rerope(args, StreamLauncher{static_cast<cudaStream_t>(args.stream)});
}

}  // namespace kvspan::cuda
