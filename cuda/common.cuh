// What the CUDA kernels share: storage types, 16-byte packs, and how kernels are launched.
//
// Kernel bodies live in *_kernel.cuh and compile twice: by nvcc, and by the host compiler through
// host_shim.h, so that the tests run the very same body on a machine without a GPU. Whoever
// includes a kernel header picks one by including <cuda_runtime.h> or host_shim.h first.
//
// Moves travel as kernel parameters (4 KB at most), many to a launch: no device memory is
// allocated, nothing is copied to the device and nothing synchronises.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace kvspan::cuda {

constexpr int kThreadsPerBlock = 256;
// Accesses per thread to aim at when a block is split over thread blocks.
constexpr int kAccessesPerThread = 4;
constexpr int kVectorBytes = 16;

// 16-bit floats by their bits.
struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

// N values that are read and written as one access of an aligned pack.
template <typename T, int N, int kAlign>
struct alignas(kAlign) Pack {
  T values[N];
};

template <typename To, typename From>
__host__ __device__ inline To bit_cast_to(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

__host__ __device__ inline float to_float(float x) { return x; }

__host__ __device__ inline float to_float(BFloat16 x) {
  return bit_cast_to<float>(std::uint32_t{x.bits} << 16);
}

__host__ __device__ inline float to_float(Float16 x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  const std::uint32_t sign = std::uint32_t{x.bits} >> 15 << 31;
  const std::uint32_t exponent = x.bits >> 10 & 0x1f;
  const std::uint32_t mantissa = x.bits & 0x3ff;
  if (exponent == 0) {
    return bit_cast_to<float>(bit_cast_to<std::uint32_t>(float(mantissa) * 0x1p-24f) | sign);
  }
  const std::uint32_t wide = exponent == 31 ? 0xff : exponent + 112;  // bias 127 - 15
  return bit_cast_to<float>(sign | wide << 23 | mantissa << 13);
#endif
}

// Rounds to the storage type, to nearest even; NaN stays NaN.
template <typename T>
__host__ __device__ T from_float(float x);

template <>
__host__ __device__ inline float from_float<float>(float x) {
  return x;
}

template <>
__host__ __device__ inline BFloat16 from_float<BFloat16>(float x) {
  const std::uint32_t u = bit_cast_to<std::uint32_t>(x);
  const bool is_nan = (u & 0x7fffffff) > 0x7f800000;
  const std::uint32_t bits = is_nan ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return {static_cast<std::uint16_t>(bits)};
}

template <>
__host__ __device__ inline Float16 from_float<Float16>(float x) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(x))};
#else
  const std::uint32_t u = bit_cast_to<std::uint32_t>(x);
  const std::uint32_t magnitude = u & 0x7fffffff;
  std::uint32_t bits;
  if (magnitude > 0x7f800000) {
    bits = 0x7e00 | (magnitude >> 13 & 0x3ff);
  } else if (magnitude < 0x38800000) {  // below the smallest normal half, 2^-14
    bits = bit_cast_to<std::uint32_t>(bit_cast_to<float>(magnitude) + 0.5f) - 0x3f000000;
  } else {
    const std::uint32_t clamped = magnitude < 0x47800000 ? magnitude : 0x47800000;
    bits = ((clamped + 0xfff + (clamped >> 13 & 1)) >> 13) - (112u << 10);
  }
  return {static_cast<std::uint16_t>(bits | (u >> 16 & 0x8000))};
#endif
}

// How many thread blocks share one KV block of num_accesses accesses.
inline unsigned num_slices(std::int64_t num_accesses) {
  constexpr std::int64_t kPerSlice = std::int64_t{kThreadsPerBlock} * kAccessesPerThread;
  const std::int64_t slices = (num_accesses + kPerSlice - 1) / kPerSlice;
  return static_cast<unsigned>(slices < 65535 ? slices : 65535);  // the limit of gridDim.y
}

}  // namespace kvspan::cuda
