// The rerope kernels of token rows, and the table of all kernels. Include this from one source file
// per instruction set only; everything has internal linkage (see rerope_cpu.h).
#pragma once

#include "rerope_cpu.h"
#include "rerope_cpu_float8.h"
#include "rerope_cpu_packed.h"
#include "rerope_cpu_vector.h"

namespace kvspan::cpu {
namespace {

template <typename T, bool kStream, bool kIsOneStep>
inline void rotate_neox(const T* src, T* dst, int64_t rotary_dim, const float* cos_table,
                        const float* sin_table) {
  constexpr int kVectors = Step<T>::kVectors;
  constexpr int64_t kSize = kStepSize<T>;
  const int64_t half = kIsOneStep ? kSize : rotary_dim / 2;
  int64_t i = 0;
  const auto rotate = [&]<bool kStreams>(const T* in_1, const T* in_2, T* out_1, T* out_2) {
    F32 x_1[kVectors], x_2[kVectors];
    Step<T>::load(in_1, x_1);
    Step<T>::load(in_2, x_2);
    for (int v = 0; v < kVectors; ++v) {
      const F32 c = load(cos_table + i + v * kWidth), s = load(sin_table + i + v * kWidth);
      const F32 a = x_1[v], b = x_2[v];
      x_1[v] = a * c - b * s;
      x_2[v] = b * c + a * s;
    }
    Step<T>::template store<kStreams>(out_1, x_1);
    Step<T>::template store<kStreams>(out_2, x_2);
  };
  for (; i + kSize <= half; i += kSize) {
    rotate.template operator()<kStream>(src + i, src + half + i, dst + i, dst + half + i);
  }
  if (i < half) {
    const size_t rest_bytes = static_cast<size_t>(half - i) * sizeof(T);
    T part_1[kSize] = {}, part_2[kSize] = {};
    memcpy(part_1, src + i, rest_bytes);
    memcpy(part_2, src + half + i, rest_bytes);
    rotate.template operator()<false>(part_1, part_2, part_1, part_2);
    memcpy(dst + i, part_1, rest_bytes);
    memcpy(dst + half + i, part_2, rest_bytes);
  }
}

template <typename T, bool kStream>
inline void rotate_interleaved(const T* src, T* dst, int64_t rotary_dim, const float* cos_table,
                               const float* sin_table) {
  constexpr int kVectors = Step<T>::kVectors;
  constexpr int64_t kSize = kStepSize<T>;
  int64_t i = 0;
  const auto rotate = [&]<bool kStreams>(const T* in, T* out) {
    F32 x[kVectors];
    Step<T>::load(in, x);
    if constexpr (Step<T>::kOrder == ElementOrder::kEvenOdd) {
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
    Step<T>::template store<kStreams>(out, x);
  };
  for (; i + kSize <= rotary_dim; i += kSize) {
    rotate.template operator()<kStream>(src + i, dst + i);
  }
  if (i < rotary_dim) {
    const size_t rest_bytes = static_cast<size_t>(rotary_dim - i) * sizeof(T);
    T part[kSize] = {};
    memcpy(part, src + i, rest_bytes);
    rotate.template operator()<false>(part, part);
    memcpy(dst + i, part, rest_bytes);
  }
}

// Fetches elements of another block. Blocks lie anywhere in memory, so the hardware prefetcher
// starts anew in each, and conversions leave too few loads in flight to hide that.
template <typename T>
inline void prefetch(const void* block, int64_t first, int64_t count) {
  constexpr int64_t kCacheLine = 64;
  const char* at = reinterpret_cast<const char*>(static_cast<const T*>(block) + first);
  for (int64_t byte = 0; byte < count * static_cast<int64_t>(sizeof(T)); byte += kCacheLine) {
    __builtin_prefetch(at + byte);
  }
}

// Whether all of a block's stores are to be streamed, and can be.
template <typename T, bool kIsNeox>
inline bool is_aligned_for_streams(const RotateArgs& args) {
  if (!args.stream || args.src == args.dst) return false;
  const T* first = static_cast<const T*>(args.dst) + args.rotary_offset;
  const int64_t partner = kIsNeox ? args.rotary_dim / 2 : 0;
  const auto offsets = static_cast<size_t>(args.dst_outer_stride | args.dst_inner_stride | partner);
  return (reinterpret_cast<uintptr_t>(first) | offsets * sizeof(T)) % Step<T>::kStoreBytes == 0;
}

// kIsOneStep: NeoX's halves are a step each, so that nothing is set up again for each row.
template <typename T, bool kIsNeox, bool kStream, bool kIsOneStep>
void rotate_rows_as(const RotateArgs& by_reference) {
  const RotateArgs args = by_reference;  // a copy, which stores through dst cannot alias
  const bool in_place = args.src == args.dst;
  const int64_t rest = args.rotary_offset + args.rotary_dim;
  const size_t head_bytes = in_place ? 0 : static_cast<size_t>(args.rotary_offset) * sizeof(T);
  const size_t rest_bytes = in_place ? 0 : static_cast<size_t>(args.row_size - rest) * sizeof(T);
  // In place, only what is rotated is touched.
  const int64_t fetch_first = in_place ? args.rotary_offset : 0;
  const int64_t fetch_count = in_place ? args.rotary_dim : args.row_size;
  for (int64_t outer = 0; outer < args.num_outer; ++outer) {
    const T* src = static_cast<const T*>(args.src) + outer * args.src_outer_stride;
    T* dst = static_cast<T*>(args.dst) + outer * args.dst_outer_stride;
    for (int64_t inner = 0; inner < args.num_inner; ++inner) {
      if (args.next_src) {
        prefetch<T>(args.next_src,
                    outer * args.src_outer_stride + inner * args.src_inner_stride + fetch_first,
                    fetch_count);
        if (!in_place && !kStream) {
          prefetch<T>(args.next_dst,
                      outer * args.dst_outer_stride + inner * args.dst_inner_stride + fetch_first,
                      fetch_count);
        }
      }
      if (head_bytes) memcpy(dst, src, head_bytes);
      const T* from = src + args.rotary_offset;
      T* to = dst + args.rotary_offset;
      if constexpr (kIsNeox) {
        rotate_neox<T, kStream, kIsOneStep>(from, to, args.rotary_dim, args.cos_table,
                                            args.sin_table);
      } else {
        rotate_interleaved<T, kStream>(from, to, args.rotary_dim, args.cos_table, args.sin_table);
      }
      if (rest_bytes) memcpy(dst + rest, src + rest, rest_bytes);
      src += args.src_inner_stride;
      dst += args.dst_inner_stride;
    }
  }
}

template <typename T, bool kIsNeox, bool kStream>
inline void rotate_rows_with(const RotateArgs& args) {
  if constexpr (kIsNeox && Step<T>::kOrder == ElementOrder::kLanes) {
    if (args.rotary_dim == 2 * kStepSize<T>) {
      rotate_rows_as<T, kIsNeox, kStream, true>(args);
      return;
    }
  }
  rotate_rows_as<T, kIsNeox, kStream, false>(args);
}

template <typename T, bool kIsNeox>
void rotate_rows(const RotateArgs& args) {
  if constexpr (can_stream<T>(Step<T>::kStoreBytes)) {
    if (is_aligned_for_streams<T, kIsNeox>(args)) {
      rotate_rows_with<T, kIsNeox, true>(args);
      end_stream();
      return;
    }
  }
  rotate_rows_with<T, kIsNeox, false>(args);
}

template <typename T, bool kIsNeox>
inline RotateKernel rows_kernel() {
  constexpr ElementOrder kOrder = Step<T>::kOrder;
  RotateKernel kernel{rotate_rows<T, kIsNeox>, kOrder, kStepSize<T>, false};
  if (!kIsNeox && kOrder == ElementOrder::kEvenOdd) {
    kernel.order = ElementOrder::kPlain;  // each pair is apart
  } else {
    kernel.expanded = !kIsNeox;
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
  return kernels;
}

}  // namespace
}  // namespace kvspan::cpu
