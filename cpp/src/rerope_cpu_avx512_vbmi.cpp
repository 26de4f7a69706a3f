#if defined(__x86_64__)
#include "rerope_cpu_kernel.h"

namespace kvspan::cpu {

RotateKernels rotate_kernels_avx512_vbmi() { return rotate_kernels(); }

}  // namespace kvspan::cpu
#endif
