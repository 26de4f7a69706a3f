#include <cuda_runtime.h>

#include "causal_conv1d_kernel.cuh"
#include "gated_delta_launch.cuh"
#include "runtime.cuh"

namespace kvspan::cuda {
namespace {

// More shared memory than a kernel has without being asked.
struct SharedMemoryLauncher {
  cudaStream_t stream;

  void operator()(void (*kernel)(GatedDeltaKernelArgs), unsigned grid_x, unsigned grid_y,
                  int shared_bytes, const GatedDeltaKernelArgs& args) const {
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
               "cudaFuncSetAttribute");
    kernel<<<dim3(grid_x, grid_y), kThreadsPerBlock, static_cast<std::size_t>(shared_bytes),
             stream>>>(args);
    check_cuda(cudaGetLastError(), "kernel launch");
  }
};

}  // namespace

void gated_delta(const GatedDeltaArgs& args) {
  const DeviceGuard guard(args.v.device.index);
  launch_gated_delta(args, SharedMemoryLauncher{static_cast<cudaStream_t>(args.stream)});
}

void causal_conv1d(const CausalConv1dArgs& args) {
  const DeviceGuard guard(args.x.device.index);
  launch_causal_conv1d(args, StreamLauncher{static_cast<cudaStream_t>(args.stream)});
}

}  // namespace kvspan::cuda
