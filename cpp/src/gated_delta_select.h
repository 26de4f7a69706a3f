// The kernels of an instruction set and a storage type, for the drivers.
#pragma once

#include "gated_delta_cpu.h"
#include "kvspan/check.h"
#include "kvspan/tensor_view.h"
#include "kvspan/vector_isa.h"

namespace kvspan::cpu {

inline GatedDeltaKernels select_kernels(VectorIsa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case VectorIsa::kAvx512Vbmi:
    case VectorIsa::kAvx512:
      return gated_delta_kernels_avx512();
    case VectorIsa::kAvx2:
      return gated_delta_kernels_avx2();
#endif
    default:
      return gated_delta_kernels_baseline();
  }
}

inline StateType state_type(DType dtype) {
  if (dtype == kFloat32) return kStateF32;
  if (dtype == kBFloat16) return kStateBF16;
  KVSPAN_ASSERT(dtype == kFloat16);
  return kStateF16;
}

}  // namespace kvspan::cpu
