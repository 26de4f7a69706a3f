#include <cuda_runtime.h>

#include "causal_conv1d_kernel.cuh"
#include "gated_delta_launch.cuh"
#include "runtime.cuh"

namespace kvspan::cuda {
namespace {

// More shared memory than a kernel has without being asked.
struct SharedMemoryLauncher {
  int device;
  StreamLauncher launch;

  void operator()(void (*kernel)(GatedDeltaKernelArgs), unsigned grid_x, unsigned grid_y,
                  int shared_bytes, const GatedDeltaKernelArgs& args) const {
    int most = 0;
    check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "cudaDeviceGetAttribute");
    KVSPAN_CHECK(shared_bytes <= most, DeviceError, "k: a key_dim of ", args.key_dim, " takes ",
                 shared_bytes, " bytes of shared memory, CUDA device ", device, " has ", most,
                 " for a thread block");
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
               "cudaFuncSetAttribute");
    launch(kernel, grid_x, grid_y, args, shared_bytes);
  }
};

}  // namespace

void gated_delta(const GatedDeltaArgs& args) {
  const int device = args.v.device.index;
  const DeviceGuard guard(device);
  launch_gated_delta(args, SharedMemoryLauncher{device, {static_cast<cudaStream_t>(args.stream)}});
}

void causal_conv1d(const CausalConv1dArgs& args) {
  const DeviceGuard guard(args.x.device.index);
  launch_causal_conv1d(args, StreamLauncher{static_cast<cudaStream_t>(args.stream)});
}

}  // namespace kvspan::cuda
