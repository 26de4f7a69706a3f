#include <cuda_runtime.h>

#include "rerope_launch.cuh"
#include "runtime.cuh"

namespace kvspan::cuda {

void rerope(const ReropeArgs& args) {
  const DeviceGuard guard(args.layers[0].k_src.device.index);
  launch_rerope(args, StreamLauncher{static_cast<cudaStream_t>(args.stream)});
}

}  // namespace kvspan::cuda
