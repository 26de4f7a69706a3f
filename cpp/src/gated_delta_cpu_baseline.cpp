#include "causal_conv1d_cpu_kernel.h"
#include "gated_delta_cpu_kernel.h"

namespace kvspan::cpu {

GatedDeltaKernels gated_delta_kernels_baseline() {
  return {.run = run_gated_delta, .conv = {run_conv<float>, run_conv<BFloat16>, run_conv<Float16>}};
}

}  // namespace kvspan::cpu
