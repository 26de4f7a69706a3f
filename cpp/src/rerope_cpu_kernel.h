// The rerope kernels of token rows, and the table of all kernels. Include this from one source file
// per instruction set only; everything has internal linkage (see rerope_cpu.h).
#pragma once

#include "rerope_cpu.h"
#include "rerope_cpu_float8.h"
#include "rerope_cpu_packed.h"
#include "rerope_cpu_prefetch.h"
#include "rerope_cpu_stages.h"
#include "rerope_cpu_vector.h"

namespace kvspan::cpu {
namespace {

// Cosines and sines of kCount vectors.
template <int kCount>
struct Angles {
  F32 cosines[kCount], sines[kCount];

  Angles(const float* cos_table, const float* sin_table) {
    for (int v = 0; v < kCount; ++v) {
      cosines[v] = load(cos_table + v * kWidth);
      sines[v] = load(sin_table + v * kWidth);
    }
  }
};

// A step that holds fewer elements.
template <typename T>
struct PartOfStep {
  T elements[kStepSize<T>];
  size_t num_bytes;

  PartOfStep(const T* src, int64_t count) : num_bytes(static_cast<size_t>(count) * sizeof(T)) {
#if defined(__AVX512BW__)  // without a detour by way of memory
    if constexpr (sizeof(elements) == 64) {
      store_bits(elements, _mm512_maskz_loadu_epi8(~uint64_t{} >> (64 - num_bytes), src));
      return;
    }
#endif
    memset(elements, 0, sizeof(elements));
    memcpy(elements, src, num_bytes);
  }

  void store(T* dst) const { memcpy(dst, elements, num_bytes); }
};

template <typename T, bool kStream>
inline void rotate_step(const T* in_1, const T* in_2, T* out_1, T* out_2, const F32* cosines,
                        const F32* sines) {
  constexpr int kVectors = Step<T>::kVectors;
  F32 x_1[kVectors], x_2[kVectors];
  Step<T>::load(in_1, x_1);
  Step<T>::load(in_2, x_2);
  for (int v = 0; v < kVectors; ++v) {
    const F32 a = x_1[v], b = x_2[v];
    x_1[v] = a * cosines[v] - b * sines[v];
    x_2[v] = b * cosines[v] + a * sines[v];
  }
  Step<T>::template store<kStream>(out_1, x_1);
  Step<T>::template store<kStream>(out_2, x_2);
}

template <typename T, bool kStream>
inline void rotate_neox(const T* src, T* dst, int64_t rotary_dim, const float* cos_table,
                        const float* sin_table) {
  constexpr int64_t kSize = kStepSize<T>;
  const int64_t half = rotary_dim / 2;
  int64_t i = 0;
  for (; i + kSize <= half; i += kSize) {
    const Angles<Step<T>::kVectors> at(cos_table + i, sin_table + i);
    rotate_step<T, kStream>(src + i, src + half + i, dst + i, dst + half + i, at.cosines, at.sines);
  }
  if (i < half) {
    const Angles<Step<T>::kVectors> at(cos_table + i, sin_table + i);
    PartOfStep<T> part_1(src + i, half - i), part_2(src + half + i, half - i);
    rotate_step<T, false>(part_1.elements, part_2.elements, part_1.elements, part_2.elements,
                          at.cosines, at.sines);
    part_1.store(dst + i);
    part_2.store(dst + half + i);
  }
}

template <typename T, bool kStream>
inline void rotate_interleaved(const T* src, T* dst, int64_t rotary_dim, const float* cos_table,
                               const float* sin_table) {
  constexpr int kVectors = PairStep<T>::kVectors;
  constexpr int64_t kSize = kStepSize<T>;
  int64_t i = 0;
  const auto rotate = [&]<bool kStreams>(const T* in, T* out) {
    F32 x[kVectors];
    PairStep<T>::load(in, x);
    if constexpr (PairStep<T>::kSplitsPairs) {
      for (int v = 0; v < kVectors / 2; ++v) {
        const int64_t at = i / 2 + v * kWidth;
        const F32 c = load(cos_table + at), s = load(sin_table + at);
        const F32 a = x[v], b = x[v + kVectors / 2];
        x[v] = a * c - b * s;
        x[v + kVectors / 2] = b * c + a * s;
      }
    } else {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = i + v * kWidth;
        x[v] = x[v] * load(cos_table + at) + swap_pairs(x[v]) * load(sin_table + at);
      }
    }
    PairStep<T>::template store<kStreams>(out, x);
  };
  for (; i + kSize <= rotary_dim; i += kSize) {
    rotate.template operator()<kStream>(src + i, dst + i);
  }
  if (i < rotary_dim) {
    PartOfStep<T> part(src + i, rotary_dim - i);
    rotate.template operator()<false>(part.elements, part.elements);
    part.store(dst + i);
  }
}

// Whether all of a block's stores are to be streamed, and can be.
template <typename T, bool kIsNeox>
inline bool is_aligned_for_streams(const RotateArgs& args) {
  if (!args.stream || args.src == args.dst) return false;
  const T* first = static_cast<const T*>(args.dst) + args.rotary_offset;
  int64_t partner = kIsNeox ? args.rotary_dim / 2 : 0;
#if defined(__AVX512VBMI__)
  if (sizeof(T) == 1 && args.rotary_dim == kStepSize<T>) partner = 0;  // a row is stored whole
#endif
  const auto offsets = static_cast<size_t>(args.dst_outer_stride | args.dst_inner_stride | partner);
  return (reinterpret_cast<uintptr_t>(first) | offsets * sizeof(T)) % Step<T>::kStoreBytes == 0;
}

// Copies what of each row is not rotated.
template <typename T>
inline void copy_rest(const RotateArgs& args) {
  const int64_t rest = args.rotary_offset + args.rotary_dim;
  const size_t head_bytes = static_cast<size_t>(args.rotary_offset) * sizeof(T);
  const size_t rest_bytes = static_cast<size_t>(args.row_size - rest) * sizeof(T);
  if (args.src == args.dst || head_bytes + rest_bytes == 0) return;
  for (int64_t outer = 0; outer < args.num_outer; ++outer) {
    const T* src = static_cast<const T*>(args.src) + outer * args.src_outer_stride;
    T* dst = static_cast<T*>(args.dst) + outer * args.dst_outer_stride;
    for (int64_t inner = 0; inner < args.num_inner; ++inner) {
      if (head_bytes) memcpy(dst, src, head_bytes);
      if (rest_bytes) memcpy(dst + rest, src + rest, rest_bytes);
      src += args.src_inner_stride;
      dst += args.dst_inner_stride;
    }
  }
}

// kSteps: NeoX's halves are as many steps, whose angles stay in registers; 0 for any other rows.
template <typename T, bool kIsNeox, bool kStream, int kSteps>
void rotate_rows_as(const RotateArgs& by_reference) {
  const RotateArgs args = by_reference;  // a copy, which stores through dst cannot alias
  constexpr int kVectors = Step<T>::kVectors;
  constexpr int64_t kSize = kStepSize<T>, kHalf = kSteps * kSize;
  const Angles<(kSteps > 0 ? kSteps * kVectors : 1)> at(args.cos_table, args.sin_table);
  for (int64_t outer = 0; outer < args.num_outer; ++outer) {
    int64_t src = outer * args.src_outer_stride, dst = outer * args.dst_outer_stride;
    for (int64_t inner = 0; inner < args.num_inner; ++inner) {
      prefetch_next<T, kStream>(args, src, dst);
      const T* from = static_cast<const T*>(args.src) + args.rotary_offset + src;
      T* to = static_cast<T*>(args.dst) + args.rotary_offset + dst;
      if constexpr (kSteps > 0) {
        for (int i = 0; i < kSteps; ++i) {
          const T* in = from + i * kSize;
          T* out = to + i * kSize;
          rotate_step<T, kStream>(in, in + kHalf, out, out + kHalf, at.cosines + i * kVectors,
                                  at.sines + i * kVectors);
        }
      } else if constexpr (kIsNeox) {
        rotate_neox<T, kStream>(from, to, args.rotary_dim, args.cos_table, args.sin_table);
      } else {
        rotate_interleaved<T, kStream>(from, to, args.rotary_dim, args.cos_table, args.sin_table);
      }
      src += args.src_inner_stride;
      dst += args.dst_inner_stride;
    }
  }
}

template <typename T, bool kIsNeox, bool kStream>
inline void rotate_rows_with(const RotateArgs& args) {
#if defined(__AVX512VBMI__)
  if constexpr (sizeof(T) == 1) {
    using S = typename StepOf<T, kIsNeox>::Type;
    if (try_rotate_rows_in_stages<S, kStream>(args)) return;
  }
#endif
  if constexpr (kIsNeox) {
    // Four vectors of cosines, and as many of sines, leave registers for the rest.
    constexpr int kMostSteps = 4 / Step<T>::kVectors;
    constexpr int64_t kSize = 2 * kStepSize<T>;
    const int64_t steps = args.rotary_dim % kSize == 0 ? args.rotary_dim / kSize : 0;
    if (steps == 1) return rotate_rows_as<T, kIsNeox, kStream, 1>(args);
    if constexpr (kMostSteps >= 2) {
      if (steps == 2) return rotate_rows_as<T, kIsNeox, kStream, 2>(args);
    }
    if constexpr (kMostSteps >= 4) {
      if (steps == 4) return rotate_rows_as<T, kIsNeox, kStream, 4>(args);
    }
  }
  rotate_rows_as<T, kIsNeox, kStream, 0>(args);
}

template <typename T, bool kIsNeox>
void rotate_rows(const RotateArgs& args) {
  if constexpr (can_stream<T>(Step<T>::kStoreBytes)) {
    if (is_aligned_for_streams<T, kIsNeox>(args)) {
      rotate_rows_with<T, kIsNeox, true>(args);
      return copy_rest<T>(args);
    }
  }
  rotate_rows_with<T, kIsNeox, false>(args);
  copy_rest<T>(args);
}

template <typename T, bool kIsNeox>
inline RotateKernel rows_kernel() {
  using S = typename StepOf<T, kIsNeox>::Type;
  RotateKernel kernel{rotate_rows<T, kIsNeox>, S::kOrder, kStepSize<T>, !kIsNeox};
  if constexpr (!kIsNeox) {
    if (S::kSplitsPairs) {  // an entry for each pair
      kernel.expanded = false;
      kernel.step /= 2;
      if (kernel.order == ElementOrder::kEvenOdd) kernel.order = ElementOrder::kPlain;
    }
  }
  return kernel;
}

inline RotateKernels rotate_kernels() {
  RotateKernels kernels{
      .rows = {{rows_kernel<float, false>(), rows_kernel<float, true>()},
               {rows_kernel<BFloat16, false>(), rows_kernel<BFloat16, true>()},
               {rows_kernel<Float16, false>(), rows_kernel<Float16, true>()},
               {rows_kernel<Float8E4M3, false>(), rows_kernel<Float8E4M3, true>()},
               {rows_kernel<Float8E5M2, false>(), rows_kernel<Float8E5M2, true>()}},
      .vec = {},
      .amx = {{.run = rotate_amx<BFloat16, false>}, {.run = rotate_amx<BFloat16, true>}},
  };
  kernels.vec[kStoreF32][0].run = rotate_vec<float, false>;
  kernels.vec[kStoreF32][1].run = rotate_vec<float, true>;
  kernels.vec[kStoreBF16][0].run = rotate_vec<BFloat16, false>;
  kernels.vec[kStoreBF16][1].run = rotate_vec<BFloat16, true>;
  kernels.vec[kStoreF16][0].run = rotate_vec<Float16, false>;
  kernels.vec[kStoreF16][1].run = rotate_vec<Float16, true>;
  kernels.vec[kStoreE4M3][0].run = rotate_vec<Float8E4M3, false>;
  kernels.vec[kStoreE4M3][1].run = rotate_vec<Float8E4M3, true>;
  kernels.vec[kStoreE5M2][0].run = rotate_vec<Float8E5M2, false>;
  kernels.vec[kStoreE5M2][1].run = rotate_vec<Float8E5M2, true>;
  return kernels;
}

}  // namespace
}  // namespace kvspan::cpu
