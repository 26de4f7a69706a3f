#include "rerope_cpu_kernel.h"

namespace kvspan::cpu {

RotateKernels rotate_kernels_baseline() { return rotate_kernels(); }

}  // namespace kvspan::cpu
