// The rerope kernels of token rows, and the table of all kernels. Include this from one source file
// per instruction set only; everything has internal linkage (see rerope_cpu.h).
#pragma once

#include "rerope_cpu.h"
#include "rerope_cpu_packed.h"
#include "rerope_cpu_vector.h"

namespace kvspan::cpu {
namespace {

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

template <typename T, bool kIsNeox>
void rotate_rows(const RotateArgs& by_reference) {
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
        if (!in_place) {
          prefetch<T>(args.next_dst,
                      outer * args.dst_outer_stride + inner * args.dst_inner_stride + fetch_first,
                      fetch_count);
        }
      }
      if (head_bytes) memcpy(dst, src, head_bytes);
      const T* from = src + args.rotary_offset;
      T* to = dst + args.rotary_offset;
      if constexpr (kIsNeox) {
        rotate_neox(from, to, args.rotary_dim, args.cos_table, args.sin_table);
      } else {
        rotate_interleaved(from, to, args.rotary_dim, args.cos_table, args.sin_table);
      }
      if (rest_bytes) memcpy(dst + rest, src + rest, rest_bytes);
      src += args.src_inner_stride;
      dst += args.dst_inner_stride;
    }
  }
}

inline RotateKernels rotate_kernels() {
  return {
      .rows = {{rotate_rows<float, false>, rotate_rows<float, true>},
               {rotate_rows<BFloat16, false>, rotate_rows<BFloat16, true>},
               {rotate_rows<Float16, false>, rotate_rows<Float16, true>},
               {rotate_rows<Float8E4M3, false>, rotate_rows<Float8E4M3, true>},
               {rotate_rows<Float8E5M2, false>, rotate_rows<Float8E5M2, true>}},
      .vec = {{rotate_vec<float, false>, rotate_vec<float, true>},
              {rotate_vec<BFloat16, false>, rotate_vec<BFloat16, true>},
              {rotate_vec<Float16, false>, rotate_vec<Float16, true>},
              {},
              {}},
      .amx = {{}, {rotate_amx<BFloat16, false>, rotate_amx<BFloat16, true>}, {}, {}, {}},
  };
}

}  // namespace
}  // namespace kvspan::cpu
