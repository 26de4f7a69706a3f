#include <cuda_runtime.h>

#include "block_copy_kernel.cuh"
#include "runtime.cuh"

namespace kvspan::cuda {

void copy_blocks(const BlockCopyArgs& args) {
  const DeviceGuard guard(args.src.device.index);
  launch_block_copy(args, StreamLauncher{static_cast<cudaStream_t>(args.stream)});
}

}  // namespace kvspan::cuda
