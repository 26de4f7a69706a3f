// Vectors of floats and their conversions from and to the storage types, for the rerope kernels:
// written with compiler vector types and compiled once per instruction set. Everything has internal
// linkage (see rerope_cpu.h).
#pragma once

#include <stdint.h>
#include <string.h>

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
using U64 = uint64_t __attribute__((vector_size(kVectorBytes)));
using U16 = uint16_t __attribute__((vector_size(kVectorBytes / 2)));
using U8 = uint8_t __attribute__((vector_size(kVectorBytes / 4)));

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
#if defined(__AVX2__) && !defined(__AVX512F__)
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

inline U16 widen_bytes(U8 v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const auto bits = load_bits<int64_t>(&v);
  return (U16)_mm_cvtepu8_epi16(_mm_cvtsi64_si128(bits));
#elif defined(__SSE2__) && !defined(__AVX2__)
  const __m128i bytes = _mm_cvtsi32_si128(load_bits<int32_t>(&v));
  const __m128i words = _mm_unpacklo_epi8(bytes, _mm_setzero_si128());
  return load_bits<U16>(&words);
#else
  return __builtin_convertvector(v, U16);
#endif
}

inline U8 narrow_to_bytes(U32 v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i words = (__m128i)narrow(v);
  const __m128i packed = _mm_packus_epi16(words, words);
  return load_bits<U8>(&packed);
#elif defined(__SSE2__) && !defined(__AVX2__)
  const __m128i words = _mm_packs_epi32((__m128i)v, (__m128i)v);
  const __m128i packed = _mm_packus_epi16(words, words);
  return load_bits<U8>(&packed);
#else
  return __builtin_convertvector(v, U8);
#endif
}

// Half precision. Conversion instructions take and give subnormal halves in every thread; the code
// without them never passes one through a subnormal float, which a thread that flushes those to
// zero would lose. NaN stays NaN.
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

// Rounds to an 8-bit float of kMantissaBits and exponent bias kBias, to nearest even; beyond
// kMax (bits of a float), infinity included, the result is the largest finite number. NaN becomes
// 0x7f, as CUDA's conversion has it.
template <int kMantissaBits, int kBias, uint32_t kMax>
inline U8 to_float8(F32 v) {
  constexpr int kShift = 23 - kMantissaBits;
  constexpr uint32_t kSmallestNormal = (127u - kBias + 1) << 23;
  // The float whose unit in the last place is that of the subnormals, 2^(1 - bias - mantissa bits).
  constexpr uint32_t kMagic = (127u + 1 - kBias + kShift) << 23;
  const U32 u = (U32)v;
  const U32 sign = (u >> 24) & 0x80;
  const U32 magnitude = u & 0x7fffffff;
  const U32 clamped = (S32)magnitude < (int32_t)kMax ? magnitude : (U32{} + kMax);
  const U32 half_way = (U32{} + ((1u << (kShift - 1)) - 1)) + ((clamped >> kShift) & 1);
  const U32 normal = ((clamped + half_way) >> kShift) - ((127u - kBias) << kMantissaBits);
  const U32 subnormal = (U32)((F32)clamped + (F32)(U32{} + kMagic)) - kMagic;
  U32 bits = (S32)clamped < (int32_t)kSmallestNormal ? subnormal : normal;
  bits = (S32)magnitude > 0x7f800000 ? (U32{} + 0x7f) : bits | sign;
  return narrow_to_bytes(bits);
}

inline F32 load(const float* p) { return load_bits<F32>(p); }

inline void store(float* p, F32 v) { store_bits(p, v); }

inline F32 load(const BFloat16* p) { return (F32)(widen(load_bits<U16>(p)) << 16); }

inline void store(BFloat16* p, F32 v) {
  const U32 u = (U32)v;
  const U32 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;  // to nearest even
  const U32 quiet_nan = (u >> 16) | 0x40;
  store_bits(p, narrow((S32)(u & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded));
}

inline F32 load(const Float16* p) { return from_half(load_bits<U16>(p)); }

inline void store(Float16* p, F32 v) { store_bits(p, to_half(v)); }

// e5m2 is the upper byte of a half; e4m3's fields shifted into those of a half give 2^-8 of its
// value (exponent bias 15 - 7), subnormals included.
inline F32 load(const Float8E5M2* p) { return from_half(widen_bytes(load_bits<U8>(p)) << 8); }

inline void store(Float8E5M2* p, F32 v) { store_bits(p, to_float8<2, 15, 0x47600000>(v)); }

inline F32 load(const Float8E4M3* p) {
  const U16 x = widen_bytes(load_bits<U8>(p));
  const U16 magnitude = x & 0x7f;
  const U16 half = (x & 0x80) << 8 | magnitude << 7;
  const U16 nan = U16{} + 0x7e00;
  return from_half(magnitude == 0x7f ? nan : half) * 0x1p8f;
}

inline void store(Float8E4M3* p, F32 v) { store_bits(p, to_float8<3, 7, 0x43e00000>(v)); }

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

// Every lane, or every pair of lanes, the same.
inline F32 broadcast(const float* p) { return (F32)(U32{} + load_bits<uint32_t>(p)); }

inline F32 broadcast_pair(const float* p) { return (F32)(U64{} + load_bits<uint64_t>(p)); }

}  // namespace
}  // namespace kvspan::cpu
