// What the CUDA kernels share: storage types, 16-byte packs, and how kernels are launched.
//
// Kernel bodies live in *_kernel.cuh and compile twice: by nvcc, and by the host compiler through
// host_shim.h, so that the tests run the very same body on a machine without a GPU. Whoever
// includes a kernel header picks one by including <cuda_runtime.h> or host_shim.h first.
//
// Moves travel as kernel parameters, many to a launch: no device memory is allocated, nothing is
// copied to the device and nothing synchronises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

// Of a loop over an array that must stay in registers.
#if defined(__CUDACC__)
#define KVSPAN_UNROLL _Pragma("unroll")
#else
#define KVSPAN_UNROLL
#endif

namespace kvspan::cuda {

// What parameters may take. 32,764 bytes need CUDA 12.1 and a driver to match, which every driver
// of CUDA 13 does; few large launches leave fewer ends at which a device runs empty.
#if defined(CUDART_VERSION) && CUDART_VERSION < 13000
constexpr bool kLargeParameters = false;
#else
constexpr bool kLargeParameters = true;
#endif
constexpr std::size_t kMaxParameterBytes = kLargeParameters ? 32764 : 4096;

constexpr int kThreadsPerBlock = 256;
// Accesses per thread to aim at when a block is split over thread blocks.
constexpr int kAccessesPerThread = 4;
constexpr int kVectorBytes = 16;

// Floats of 16 and 8 bits by their bits.
struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};
struct Float8E4M3 {  // e4m3fn: no infinity
  std::uint8_t bits;
};
struct Float8E5M2 {
  std::uint8_t bits;
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

// e5m2 is the upper byte of a half.
__host__ __device__ inline float to_float(Float8E5M2 x) {
  return to_float(Float16{static_cast<std::uint16_t>(x.bits << 8)});
}

// e4m3's fields shifted into those of a half give 2^-8 of its value (exponent bias 15 - 7).
__host__ __device__ inline float to_float(Float8E4M3 x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3)));
#else
  const int magnitude = x.bits & 0x7f;
  const int half = magnitude == 0x7f ? 0x7e00 : (x.bits & 0x80) << 8 | magnitude << 7;
  return to_float(Float16{static_cast<std::uint16_t>(half)}) * 0x1p8f;
#endif
}

// The host's version of CUDA's saturating conversion, to nearest even: beyond kMax (bits of a
// float), infinity included, the largest finite number; NaN becomes 0x7f.
template <int kMantissaBits, int kBias, std::uint32_t kMax>
inline std::uint8_t host_to_float8(float x) {
  constexpr int kShift = 23 - kMantissaBits;
  constexpr std::uint32_t kSmallestNormal = (127u - kBias + 1) << 23;
  constexpr std::uint32_t kMagic = (127u + 1 - kBias + kShift) << 23;  // ulp: that of subnormals
  const std::uint32_t u = bit_cast_to<std::uint32_t>(x);
  std::uint32_t magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;
  magnitude = magnitude < kMax ? magnitude : kMax;
  std::uint32_t bits;
  if (magnitude < kSmallestNormal) {
    const float sum = bit_cast_to<float>(magnitude) + bit_cast_to<float>(kMagic);
    bits = bit_cast_to<std::uint32_t>(sum) - kMagic;
  } else {
    const std::uint32_t half_way = (1u << (kShift - 1)) - 1 + (magnitude >> kShift & 1);
    bits = ((magnitude + half_way) >> kShift) - ((127u - kBias) << kMantissaBits);
  }
  return static_cast<std::uint8_t>(bits | (u >> 24 & 0x80));
}

// Rounds to the storage type, to nearest even; NaN stays NaN. The 8-bit types saturate.
template <typename T>
__host__ __device__ T from_float(float x);

template <>
__host__ __device__ inline float from_float<float>(float x) {
  return x;
}

template <>
__host__ __device__ inline BFloat16 from_float<BFloat16>(float x) {
#if defined(__CUDA_ARCH__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  const std::uint32_t u = bit_cast_to<std::uint32_t>(x);
  const bool is_nan = (u & 0x7fffffff) > 0x7f800000;
  const std::uint32_t bits = is_nan ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return {static_cast<std::uint16_t>(bits)};
#endif
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

template <>
__host__ __device__ inline Float8E4M3 from_float<Float8E4M3>(float x) {
#if defined(__CUDA_ARCH__)
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
#else
  return {host_to_float8<3, 7, 0x43e00000>(x)};
#endif
}

template <>
__host__ __device__ inline Float8E5M2 from_float<Float8E5M2>(float x) {
#if defined(__CUDA_ARCH__)
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2)};
#else
  return {host_to_float8<2, 15, 0x47600000>(x)};
#endif
}

// kCount neighbouring values: 1, or 2, which the device converts by one instruction.
template <int kCount, typename T>
__host__ __device__ inline void to_floats(const T* from, float* to) {
#if defined(__CUDA_ARCH__)
  if constexpr (kCount == 2 && std::is_same_v<T, BFloat16>) {
    std::uint32_t bits;
    memcpy(&bits, from, sizeof(bits));
    to[0] = __uint_as_float(bits << 16);
    to[1] = __uint_as_float(bits & 0xffff0000);
  } else if constexpr (kCount == 2 && sizeof(T) < sizeof(float)) {
    __half2 halves;
    if constexpr (sizeof(T) == 2) {
      memcpy(&halves, from, sizeof(halves));
    } else {
      __nv_fp8x2_storage_t bits;
      memcpy(&bits, from, sizeof(bits));
      halves = __half2(
          __nv_cvt_fp8x2_to_halfraw2(bits, std::is_same_v<T, Float8E4M3> ? __NV_E4M3 : __NV_E5M2));
    }
    const float2 two = __half22float2(halves);
    to[0] = two.x;
    to[1] = two.y;
  } else
#endif
  {
    for (int i = 0; i < kCount; ++i) to[i] = to_float(from[i]);
  }
}

template <int kCount, typename T>
__host__ __device__ inline void from_floats(const float* from, T* to) {
#if defined(__CUDA_ARCH__)
  if constexpr (kCount == 2 && std::is_same_v<T, BFloat16>) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(from[0], from[1]);
    memcpy(to, &two, sizeof(two));
  } else if constexpr (kCount == 2 && std::is_same_v<T, Float16>) {
    const __half2 two = __floats2half2_rn(from[0], from[1]);
    memcpy(to, &two, sizeof(two));
  } else if constexpr (kCount == 2 && sizeof(T) == 1) {
    const __nv_fp8x2_storage_t two =
        __nv_cvt_float2_to_fp8x2(float2{from[0], from[1]}, __NV_SATFINITE,
                                 std::is_same_v<T, Float8E4M3> ? __NV_E4M3 : __NV_E5M2);
    memcpy(to, &two, sizeof(two));
  } else
#endif
  {
    for (int i = 0; i < kCount; ++i) to[i] = from_float<T>(from[i]);
  }
}

// Divides by a number that the host knows; the device has no instruction for division. For
// numbers and divisors below 2^31 (Granlund and Montgomery, 1994); a divisor of 0 is never used.
struct Divisor {
  std::uint32_t divisor = 1, multiplier = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(std::int64_t by) : divisor(static_cast<std::uint32_t>(by > 1 ? by : 1)) {
    while ((std::uint64_t{1} << shift) < divisor) ++shift;
    multiplier =
        static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift)) + divisor - 1) / divisor);
  }

  __host__ __device__ std::uint32_t quotient(std::uint32_t n) const {
    return static_cast<std::uint32_t>(std::uint64_t{2 * n} * multiplier >> 32) >> shift;
  }
  __host__ __device__ std::uint32_t remainder(std::uint32_t n, std::uint32_t quotient) const {
    return n - quotient * divisor;
  }
};

// How many thread blocks share one KV block of num_accesses accesses.
inline unsigned num_slices(std::int64_t num_accesses, int per_thread = kAccessesPerThread) {
  const std::int64_t per_slice = std::int64_t{kThreadsPerBlock} * per_thread;
  const std::int64_t slices = (num_accesses + per_slice - 1) / per_slice;
  return static_cast<unsigned>(slices < 65535 ? slices : 65535);  // the limit of gridDim.y
}

}  // namespace kvspan::cuda
