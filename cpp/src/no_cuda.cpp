// The CUDA side of a build without CUDA.
#include "copier.h"
#include "kvspan/block_copy.h"
#include "kvspan/causal_conv1d.h"
#include "kvspan/check.h"
#include "kvspan/device.h"
#include "kvspan/gated_delta.h"
#include "kvspan/rerope.h"

namespace kvspan {

bool built_with_cuda() { return false; }

int cuda_device_count() { return 0; }

void require_cuda() {
  throw DeviceError("this kvspan was built without CUDA; rebuild it with nvcc (KVSPAN_CUDA=ON)");
}

namespace cuda {

void rerope(const ReropeArgs&) { require_cuda(); }
void copy_blocks(const BlockCopyArgs&) { require_cuda(); }
void lock_pages(void*, std::int64_t) { require_cuda(); }
void unlock_pages(void*) noexcept {}
std::unique_ptr<copy_impl::Copier> make_copier(const CopyQueueOptions&) {
  require_cuda();
  return nullptr;
}
void gated_delta(const GatedDeltaArgs&) { require_cuda(); }
void causal_conv1d(const CausalConv1dArgs&) { require_cuda(); }

}  // namespace cuda
}  // namespace kvspan
