#if defined(__x86_64__)
#include "rerope_cpu_kernel.h"

namespace kvspan::cpu {

RotateKernels rotate_kernels_avx2() { return rotate_kernels(); }

}  // namespace kvspan::cpu
#endif
