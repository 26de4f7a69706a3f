// The rerope kernel body, written once with compiler vector types and compiled once per instruction
// set. Include it from one source file per set only; everything has internal linkage (see
// rerope_cpu.h).
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "rerope_cpu.h"

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

// Storage types: 16-bit floats by their bits.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <typename Vector>
inline Vector load_bits(const void* p) {
  Vector v;
  memcpy(&v, p, sizeof(v));
  return v;
}

// Between 32-bit lanes and 16-bit ones (of values below 2^16); by hand where the compiler's own
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

inline F32 load(const float* p) { return load_bits<F32>(p); }

inline void store(float* p, F32 v) { memcpy(p, &v, sizeof(v)); }

inline F32 load(const BFloat16* p) { return (F32)(widen(load_bits<U16>(p)) << 16); }

inline void store(BFloat16* p, F32 v) {
  const U32 u = (U32)v;
  const U32 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;  // to nearest even
  const U32 quiet_nan = (u >> 16) | 0x40;
  const U16 bits = narrow((S32)(u & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
  memcpy(p, &bits, sizeof(bits));
}

#if defined(__AVX512F__)
// The zero-masked forms, because GCC 12 warns of an uninitialised variable inside the plain ones.
inline F32 load(const Float16* p) {
  return (F32)_mm512_maskz_cvtph_ps(0xffff, load_bits<__m256i>(p));
}

inline void store(Float16* p, F32 v) {
  const __m256i half =
      _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  memcpy(p, &half, sizeof(half));
}
#elif defined(__F16C__)
inline F32 load(const Float16* p) { return (F32)_mm256_cvtph_ps(load_bits<__m128i>(p)); }

inline void store(Float16* p, F32 v) {
  const __m128i half = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  memcpy(p, &half, sizeof(half));
}
#elif defined(__aarch64__)
inline F32 load(const Float16* p) { return (F32)vcvt_f32_f16(load_bits<float16x4_t>(p)); }

inline void store(Float16* p, F32 v) {
  const float16x4_t half = vcvt_f16_f32((float32x4_t)v);
  memcpy(p, &half, sizeof(half));
}
#else
// Without conversion instructions: each kind of number is converted by its own formula, and the
// right one selected. Subnormal halves never pass through a subnormal float, which a thread that
// flushes them to zero would lose.
inline F32 load(const Float16* p) {
  const U32 h = widen(load_bits<U16>(p));
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

inline void store(Float16* p, F32 v) {
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
  const U16 half = narrow(bits | sign);
  memcpy(p, &half, sizeof(half));
}
#endif

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

template <typename T>
inline void rotate_neox(const T* src, T* dst, int64_t rotary_dim, const float* cos_table,
                        const float* sin_table) {
  const int64_t half = rotary_dim / 2;
  int64_t i = 0;
  const auto rotate = [&](const T* in_1, const T* in_2, T* out_1, T* out_2) {
    const F32 x_1 = load(in_1), x_2 = load(in_2);
    const F32 c = load(cos_table + i), s = load(sin_table + i);
    store(out_1, x_1 * c - x_2 * s);
    store(out_2, x_2 * c + x_1 * s);
  };
  for (; i + kWidth <= half; i += kWidth) {
    rotate(src + i, src + half + i, dst + i, dst + half + i);
  }
  if (i < half) {
    const size_t rest_bytes = static_cast<size_t>(half - i) * sizeof(T);
    T part_1[kWidth] = {}, part_2[kWidth] = {};
    memcpy(part_1, src + i, rest_bytes);
    memcpy(part_2, src + half + i, rest_bytes);
    rotate(part_1, part_2, part_1, part_2);
    memcpy(dst + i, part_1, rest_bytes);
    memcpy(dst + half + i, part_2, rest_bytes);
  }
}

template <typename T>
inline void rotate_interleaved(const T* src, T* dst, int64_t rotary_dim, const float* cos_table,
                               const float* sin_table) {
  int64_t i = 0;
  const auto rotate = [&](const T* in, T* out) {
    const F32 x = load(in);
    store(out, x * load(cos_table + i) + swap_pairs(x) * load(sin_table + i));
  };
  for (; i + kWidth <= rotary_dim; i += kWidth) rotate(src + i, dst + i);
  if (i < rotary_dim) {
    const size_t rest_bytes = static_cast<size_t>(rotary_dim - i) * sizeof(T);
    T part[kWidth] = {};
    memcpy(part, src + i, rest_bytes);
    rotate(part, part);
    memcpy(dst + i, part, rest_bytes);
  }
}

// Fetches the row of another block. Blocks lie anywhere in memory, so the hardware prefetcher
// starts anew in each, and conversions leave too few loads in flight to hide that.
template <typename T>
inline void prefetch_row(const void* block, int64_t offset, int64_t head_dim) {
  constexpr int64_t kCacheLine = 64;
  const char* row = reinterpret_cast<const char*>(static_cast<const T*>(block) + offset);
  for (int64_t byte = 0; byte < head_dim * static_cast<int64_t>(sizeof(T)); byte += kCacheLine) {
    __builtin_prefetch(row + byte);
  }
}

template <typename T, bool kIsNeox>
void rotate_block(const RotateArgs& by_reference) {
  const RotateArgs args = by_reference;  // a copy, which stores through dst cannot alias
  const size_t rest_bytes = static_cast<size_t>(args.head_dim - args.rotary_dim) * sizeof(T);
  const bool copy_rest = rest_bytes > 0 && args.src != args.dst;
  for (int64_t outer = 0; outer < args.num_outer; ++outer) {
    const T* src = static_cast<const T*>(args.src) + outer * args.src_outer_stride;
    T* dst = static_cast<T*>(args.dst) + outer * args.dst_outer_stride;
    for (int64_t inner = 0; inner < args.num_inner; ++inner) {
      if (args.next_src) {
        prefetch_row<T>(args.next_src,
                        outer * args.src_outer_stride + inner * args.src_inner_stride,
                        args.head_dim);
        prefetch_row<T>(args.next_dst,
                        outer * args.dst_outer_stride + inner * args.dst_inner_stride,
                        args.head_dim);
      }
      if constexpr (kIsNeox) {
        rotate_neox(src, dst, args.rotary_dim, args.cos_table, args.sin_table);
      } else {
        rotate_interleaved(src, dst, args.rotary_dim, args.cos_table, args.sin_table);
      }
      if (copy_rest) memcpy(dst + args.rotary_dim, src + args.rotary_dim, rest_bytes);
      src += args.src_inner_stride;
      dst += args.dst_inner_stride;
    }
  }
}

inline RotateKernels rotate_kernels() {
  return {{rotate_block<float, false>, rotate_block<float, true>},
          {rotate_block<BFloat16, false>, rotate_block<BFloat16, true>},
          {rotate_block<Float16, false>, rotate_block<Float16, true>}};
}

}  // namespace
}  // namespace kvspan::cpu
