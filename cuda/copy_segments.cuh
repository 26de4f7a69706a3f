// The kernel that copies segments of memory, page-locked host memory among it, where the driver has
// no batched copy; and how it is launched. See kvspan/copy_queue.h.
#pragma once

#include <algorithm>
#include <span>

#include "common.cuh"
#include "kvspan/copy_queue.h"

namespace kvspan::cuda {

constexpr int kSegmentsPerLaunch = 160;

struct CopySegmentsKernelArgs {
  CopySegment segments[kSegmentsPerLaunch];
};
static_assert(sizeof(CopySegmentsKernelArgs) <= 4096, "what kernel parameters may take everywhere");

// A segment by gridDim.y thread blocks. Accesses of kBytes where both sides are aligned to them.
template <int kBytes>
__global__ void __launch_bounds__(kThreadsPerBlock)
    copy_segments_kernel(const __grid_constant__ CopySegmentsKernelArgs args) {
  using Access = Pack<unsigned char, kBytes, kBytes>;
  const CopySegment segment = args.segments[blockIdx.x];
  const char* src = static_cast<const char*>(segment.src);
  char* dst = static_cast<char*>(segment.dst);
  const std::int64_t first = std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.x;
  std::int64_t copied = 0;
  if ((reinterpret_cast<std::uintptr_t>(src) | reinterpret_cast<std::uintptr_t>(dst)) % kBytes ==
      0) {
    const std::int64_t num_accesses = segment.bytes / kBytes;
    for (std::int64_t i = first; i < num_accesses; i += step) {
      reinterpret_cast<Access*>(dst)[i] = reinterpret_cast<const Access*>(src)[i];
    }
    copied = num_accesses * kBytes;
  }
  for (std::int64_t i = copied + first; i < segment.bytes; i += step) dst[i] = src[i];
}

// Calls launch(kernel, grid_x, grid_y, kernel_args) for all segments.
template <typename Launch>
void launch_copy_segments(std::span<const CopySegment> segments, const Launch& launch) {
  while (!segments.empty()) {
    const std::size_t count = std::min<std::size_t>(segments.size(), kSegmentsPerLaunch);
    CopySegmentsKernelArgs args{};
    std::copy_n(segments.begin(), count, args.segments);
    std::int64_t longest = 0;
    for (std::size_t i = 0; i < count; ++i) longest = std::max(longest, segments[i].bytes);
    const std::int64_t num_accesses = (longest + kVectorBytes - 1) / kVectorBytes;
    launch(&copy_segments_kernel<kVectorBytes>, static_cast<unsigned>(count),
           num_slices(num_accesses), args);
    segments = segments.subspan(count);
  }
}

}  // namespace kvspan::cuda
