// Vectors of floats and their conversions from and to the storage types, for the rerope kernels:
// written with compiler vector types and compiled once per instruction set. Everything has internal
// linkage (see rerope_cpu.h).
#pragma once

#include <stdint.h>
#include <string.h>

#include "rerope_cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvspan::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kWidth = kVectorBytes / 4;

using F32 = float __attribute__((vector_size(kVectorBytes)));
using U32 = uint32_t __attribute__((vector_size(kVectorBytes)));
using S32 = int32_t __attribute__((vector_size(kVectorBytes)));  // x86 compares signed lanes only
using U16 = uint16_t __attribute__((vector_size(kVectorBytes / 2)));
using S16 = int16_t __attribute__((vector_size(kVectorBytes / 2)));

// Storage types: floats of 16 and 8 bits by their bits.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4M3 {  // e4m3fn: no infinity
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

template <typename Vector>
inline Vector load_bits(const void* p) {
  Vector v;
  memcpy(&v, p, sizeof(v));
  return v;
}

template <typename Vector>
inline void store_bits(void* p, Vector v) {
  memcpy(p, &v, sizeof(v));
}

// Past the caches where the machine can and kStream is set: p is then aligned to the vector.
template <bool kStream, typename Vector>
inline void put(void* p, Vector v) {
#if defined(__SSE2__)
  if constexpr (kStream) {
#if defined(__AVX512F__)
    if constexpr (sizeof(v) == 64) return _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)v);
#endif
#if defined(__AVX2__)
    if constexpr (sizeof(v) == 32) return _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)v);
#endif
    if constexpr (sizeof(v) == 16) return _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)v);
  }
#endif
  store_bits(p, v);
}

// Whether a type's stores gain by it: those of whole cache lines, and of floats, which leave time
// to gather a line from parts. Narrower types lose (measured).
template <typename T>
constexpr bool can_stream(size_t store_bytes) {
#if defined(__SSE2__)
  return store_bytes == 64 || (sizeof(T) == 4 && store_bytes >= 16);
#else
  return store_bytes == 0;
#endif
}

// Between 32-bit lanes and narrower ones (of values that fit); by hand where the compiler's own
// code is slow.
inline U32 widen(U16 v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (U32)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, U32);
#endif
}

inline U16 narrow(U32 v) {
#if defined(__AVX512F__)
  return (U16)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)v);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  return (U16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#elif defined(__SSE2__) && !defined(__AVX2__)
  const __m128i sign_extended = (__m128i)((S32)(v << 16) >> 16);  // SSE2 packs signed lanes only
  const __m128i packed = _mm_packs_epi32(sign_extended, sign_extended);
  return load_bits<U16>(&packed);
#else
  return __builtin_convertvector(v, U16);
#endif
}

// Half precision. Conversion instructions take and give subnormal halves in every thread; the code
// without them never passes one through a subnormal float, which a thread that flushes those to
// zero would lose. NaN stays NaN.
#if defined(__AVX512F__) || defined(__F16C__) || defined(__aarch64__)
constexpr bool kConvertsHalves = true;
#else
constexpr bool kConvertsHalves = false;
#endif

#if defined(__AVX512F__)
// The zero-masked forms, because GCC 12 warns of an uninitialised variable inside the plain ones.
inline F32 from_half(U16 h) { return (F32)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h); }

inline U16 to_half(F32 v) {
  return (U16)_mm512_maskz_cvtps_ph(0xffff, (__m512)v,
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
inline F32 from_half(U16 h) { return (F32)_mm256_cvtph_ps((__m128i)h); }

inline U16 to_half(F32 v) {
  return (U16)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__aarch64__)
inline F32 from_half(U16 h) { return (F32)vcvt_f32_f16((float16x4_t)h); }

inline U16 to_half(F32 v) { return (U16)vcvt_f16_f32((float32x4_t)v); }
#else
// Each kind of number is converted by its own formula, and the right one selected.
inline F32 from_half(U16 half) {
  const U32 h = widen(half);
  const U32 sign = (h & 0x8000) << 16;
  const U32 magnitude = (h & 0x7fff) << 13;
  const U32 normal = magnitude + (112u << 23);  // exponent bias 127 - 15
  const U32 subnormal = (U32)(__builtin_convertvector((S32)(h & 0x3ff), F32) * 0x1p-24f);
  const U32 inf_or_nan = magnitude | 0x7f800000 | ((h & 0x3ff) != 0 ? (U32{} + 0x400000) : U32{});
  const U32 exponent = h & 0x7c00;
  U32 bits = exponent == 0 ? subnormal : normal;
  bits = exponent == 0x7c00 ? inf_or_nan : bits;
  return (F32)(bits | sign);
}

inline U16 to_half(F32 v) {
  const U32 u = (U32)v;
  const U32 sign = (u >> 16) & 0x8000;
  const U32 magnitude = u & 0x7fffffff;
  // 2^16 and above become infinity; from there down, rounding carries into the exponent by itself.
  const U32 clamped = (S32)magnitude < 0x47800000 ? magnitude : (U32{} + 0x47800000);
  const U32 normal = ((clamped + 0xfff + ((clamped >> 13) & 1)) >> 13) - (112u << 10);
  // One unit in the last place of 0.5f is 2^-24, the smallest subnormal half.
  const U32 subnormal = (U32)((F32)magnitude + 0.5f) - 0x3f000000;
  const U32 quiet_nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  U32 bits = (S32)magnitude < 0x38800000 ? subnormal : normal;
  bits = (S32)magnitude > 0x7f800000 ? quiet_nan : bits;
  return narrow(bits | sign);
}
#endif

inline bool any_nan(F32 a, F32 b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q)) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps(_mm_cmpunord_ps((__m128)a, (__m128)b)) != 0;
#else
  const S32 nan = (a != a) | (b != b);
  uint64_t halves[2];
  memcpy(halves, &nan, sizeof(halves));
  return (halves[0] | halves[1]) != 0;
#endif
}

// A step: as many elements as one access of memory holds, in lanes of 32 bits, in the order that
// takes them apart at the least cost (kOrder; see rerope_cpu.h).
template <typename T>
struct Step;

template <>
struct Step<float> {
  static constexpr int kVectors = 1;
  static constexpr ElementOrder kOrder = ElementOrder::kPlain;
  static void load(const float* p, F32* x) { x[0] = load_bits<F32>(p); }
  static constexpr size_t kStoreBytes = sizeof(F32);
  template <bool kStream>
  static void store(float* p, const F32* x) {
    put<kStream>(p, x[0]);
  }
};

template <>
struct Step<Float16> {
  static constexpr int kVectors = 1;
  static constexpr ElementOrder kOrder = ElementOrder::kPlain;
  static void load(const Float16* p, F32* x) { x[0] = from_half(load_bits<U16>(p)); }
  static constexpr size_t kStoreBytes = sizeof(U16);
  template <bool kStream>
  static void store(Float16* p, const F32* x) {
    put<kStream>(p, to_half(x[0]));
  }
};

template <>
struct Step<BFloat16> {
  static constexpr int kVectors = 2;
  static constexpr ElementOrder kOrder = ElementOrder::kEvenOdd;

  static void load(const BFloat16* p, F32* x) {
    const auto bits = load_bits<U32>(p);
    x[0] = (F32)(bits << 16);
    x[1] = (F32)(bits & 0xffff0000);
  }

  static constexpr size_t kStoreBytes = sizeof(U32);
  template <bool kStream>
  static void store(BFloat16* p, const F32* x) {
    U32 even = round(x[0]), odd = round(x[1]);
    if (any_nan(x[0], x[1])) {  // never in a sound cache, and so cheaper as a branch
      even = x[0] != x[0] ? (U32)x[0] | 0x400000 : even;
      odd = x[1] != x[1] ? (U32)x[1] | 0x400000 : odd;
    }
    put<kStream>(p, (even >> 16) | (odd & 0xffff0000));
  }

 private:
  // To nearest even in the upper half of each lane; not for NaN.
  static U32 round(F32 v) {
    const U32 u = (U32)v;
    return u + 0x7fff + ((u >> 16) & 1);
  }
};

// The step of pairs of neighbours: another one where even and odd elements come apart at no cost.
template <typename T>
struct PairStep : Step<T> {
  static constexpr bool kSplitsPairs = Step<T>::kOrder == ElementOrder::kEvenOdd;
};

template <typename T, bool kIsNeox>
struct StepOf {
  using Type = Step<T>;
};

template <typename T>
struct StepOf<T, false> {
  using Type = PairStep<T>;
};

// Elements of a step.
template <typename T>
inline constexpr int64_t kStepSize = int64_t{Step<T>::kVectors} * kWidth;

// Lanes 2i and 2i + 1 exchanged.
inline F32 swap_pairs(F32 v) {
#if defined(__clang__)
#if defined(__AVX512F__)
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif defined(__AVX2__)
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
#else
  return __builtin_shufflevector(v, v, 1, 0, 3, 2);
#endif
#else
  U32 lanes;
  for (int i = 0; i < kWidth; ++i) lanes[i] = i ^ 1;
  return __builtin_shuffle(v, lanes);
#endif
}

inline F32 load(const float* p) { return load_bits<F32>(p); }

inline F32 broadcast(const float* p) { return (F32)(U32{} + load_bits<uint32_t>(p)); }

}  // namespace
}  // namespace kvspan::cpu
