// What the gated delta kernels add to the vectors of rerope_cpu_vector.h: fused multiply-adds, rows
// of any type to and from floats, and register blocks of matrix products. Internal linkage only.
#pragma once

#include "rerope_cpu_vector.h"

namespace kvspan::cpu {
namespace {

// A block of a product: kBlockRows rows by up to kBlockVectors vectors of columns, all of it and a
// row of the right-hand side in registers.
constexpr int kBlockRows = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kBlockVectors = 4;
#else
constexpr int kBlockVectors = 2;
#endif

inline F32 multiply_add(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline F32 splat(float x) { return F32{} + x; }

inline F32 load_lanes(const float* p) { return load_bits<F32>(p); }
inline F32 load_lanes(const BFloat16* p) { return (F32)(widen(load_bits<U16>(p)) << 16); }
inline F32 load_lanes(const Float16* p) { return from_half(load_bits<U16>(p)); }

inline void store_lanes(float* p, F32 v) { store_bits(p, v); }
inline void store_lanes(Float16* p, F32 v) { store_bits(p, to_half(v)); }
inline void store_lanes(BFloat16* p, F32 v) {
  const U32 u = (U32)v;
  const U32 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  store_bits(p, narrow(v != v ? (u >> 16) | 0x40 : rounded));
}

// A vector of which count elements are there; the other lanes are 0, or not stored.
template <typename T>
inline F32 load_up_to(const T* p, int64_t count) {
  if (count >= kWidth) return load_lanes(p);
  T part[kWidth] = {};
  for (int i = 0; i < kWidth; ++i) {
    if (i < count) part[i] = p[i];
  }
  return load_lanes(part);
}

template <typename T>
inline void store_up_to(T* p, F32 v, int64_t count) {
  if (count >= kWidth) return store_lanes(p, v);
  T part[kWidth];
  store_lanes(part, v);
  for (int i = 0; i < kWidth; ++i) {
    if (i < count) p[i] = part[i];
  }
}

// count elements to floats, and back.
template <typename T>
inline void load_row(const T* src, int64_t count, float* dst) {
  for (int64_t i = 0; i < count; i += kWidth) {
    store_up_to(dst + i, load_up_to(src + i, count - i), count - i);
  }
}

template <typename T>
inline void store_row(const float* src, int64_t count, T* dst) {
  for (int64_t i = 0; i < count; i += kWidth) {
    store_up_to(dst + i, load_up_to(src + i, count - i), count - i);
  }
}

// dst[j][i] = src[i][j] of a rows x columns matrix.
inline void transpose(const float* src, int64_t src_stride, float* dst, int64_t dst_stride,
                      int64_t rows, int64_t columns) {
  using Four = float __attribute__((vector_size(16)));
  const int64_t whole_rows = rows / 4 * 4, whole_columns = columns / 4 * 4;
  for (int64_t i = 0; i < whole_rows; i += 4) {
    for (int64_t j = 0; j < whole_columns; j += 4) {
      Four row[4];
      for (int r = 0; r < 4; ++r) row[r] = load_bits<Four>(src + (i + r) * src_stride + j);
      const Four a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
      const Four b = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
      const Four c = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
      const Four d = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
      float* to = dst + j * dst_stride + i;
      store_bits(to, __builtin_shufflevector(a, c, 0, 1, 4, 5));
      store_bits(to + dst_stride, __builtin_shufflevector(a, c, 2, 3, 6, 7));
      store_bits(to + 2 * dst_stride, __builtin_shufflevector(b, d, 0, 1, 4, 5));
      store_bits(to + 3 * dst_stride, __builtin_shufflevector(b, d, 2, 3, 6, 7));
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j) {
      dst[j * dst_stride + i] = src[i * src_stride + j];
    }
  }
}

template <int kRows, int kVectors>
using Block = F32[kRows][kVectors];

// block += a b, where a[r][t] is at r * a_row + t * a_step and b's rows are kStrip apart.
template <int kRows, int kVectors>
inline void multiply(Block<kRows, kVectors>& block, const float* a, int64_t a_row, int64_t a_step,
                     const float* b, int64_t b_stride, int64_t count) {
  for (int64_t t = 0; t < count; ++t, a += a_step, b += b_stride) {
    F32 right[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) right[v] = load(b + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F32 left = broadcast(a + r * a_row);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) block[r][v] = multiply_add(left, right[v], block[r][v]);
    }
  }
}

// block[r] += a[r][s] * x[s] for s < r, or s <= r: the corner where the product is triangular.
template <bool kDiagonal, int kVectors>
inline void multiply_corner(Block<kBlockRows, kVectors>& block, const float* a, int64_t a_row,
                            const Block<kBlockRows, kVectors>& x) {
#pragma GCC unroll 8
  for (int r = 0; r < kBlockRows; ++r) {
#pragma GCC unroll 8
    for (int s = 0; s < r + kDiagonal; ++s) {
      const F32 left = broadcast(a + r * a_row + s);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) block[r][v] = multiply_add(left, x[s][v], block[r][v]);
    }
  }
}

// Calls run.operator()<kVectors>(first column) over num_vectors vectors of columns.
template <typename Run>
inline void for_column_blocks(int64_t num_vectors, const Run& run) {
  int64_t v = 0;
  for (; v + kBlockVectors <= num_vectors; v += kBlockVectors) {
    run.template operator()<kBlockVectors>(v * kWidth);
  }
  if constexpr (kBlockVectors == 4) {
    if (v + 2 <= num_vectors) {
      run.template operator()<2>(v * kWidth);
      v += 2;
    }
  }
  if (v < num_vectors) run.template operator()<1>(v * kWidth);
}

}  // namespace
}  // namespace kvspan::cpu
