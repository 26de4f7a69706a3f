// The rerope kernels of vLLM's packed CPU layouts (KvLayout::kCpuVec, kCpuAmx), where tokens lie
// side by side and a vector holds one dimension, or a pair of them, of many tokens. Internal
// linkage; see rerope_cpu.h.
#pragma once

#include "rerope_cpu.h"
#include "rerope_cpu_vector.h"

namespace kvspan::cpu {
namespace {

// Rotates count elements of one dimension against those of its partner; or, where even and odd
// elements are two dimensions, by an angle each: c[0], s[0] for the even ones.
template <typename T>
inline void rotate_dimensions(const T* in_1, const T* in_2, T* out_1, T* out_2, int64_t count,
                              const F32 (&c)[2], const F32 (&s)[2]) {
  constexpr int kVectors = Step<T>::kVectors;
  constexpr int64_t kSize = kStepSize<T>;
  const auto rotate = [&](const T* from_1, const T* from_2, T* to_1, T* to_2) {
    F32 x_1[kVectors], x_2[kVectors];
    Step<T>::load(from_1, x_1);
    Step<T>::load(from_2, x_2);
    for (int v = 0; v < kVectors; ++v) {
      const int odd = v >= (kVectors + 1) / 2;
      const F32 a = x_1[v], b = x_2[v];
      x_1[v] = a * c[odd] - b * s[odd];
      x_2[v] = b * c[odd] + a * s[odd];
    }
    Step<T>::template store<false>(to_1, x_1);
    Step<T>::template store<false>(to_2, x_2);
  };
  int64_t i = 0;
  for (; i + kSize <= count; i += kSize) rotate(in_1 + i, in_2 + i, out_1 + i, out_2 + i);
  if (i < count) {
    const size_t rest_bytes = static_cast<size_t>(count - i) * sizeof(T);
    T part_1[kSize] = {}, part_2[kSize] = {};
    memcpy(part_1, in_1 + i, rest_bytes);
    memcpy(part_2, in_2 + i, rest_bytes);
    rotate(part_1, part_2, part_1, part_2);
    memcpy(out_1 + i, part_1, rest_bytes);
    memcpy(out_2 + i, part_2, rest_bytes);
  }
}

// Keys of a head: [head_dim, block_size]; its values follow.
template <typename T, bool kIsNeox>
void rotate_vec(const RotateArgs& by_reference) {
  const RotateArgs args = by_reference;
  const int64_t half = args.rotary_dim / 2;
  const int64_t size = args.block_size;
  const int64_t first = args.rotary_offset * size;
  const int64_t rest = first + args.rotary_dim * size;
  for (int64_t head = 0; head < args.num_outer; ++head) {
    const T* src = static_cast<const T*>(args.src) + head * args.src_outer_stride;
    T* dst = static_cast<T*>(args.dst) + head * args.dst_outer_stride;
    for (int64_t i = 0; i < half; ++i) {
      const int64_t at_1 = first + (kIsNeox ? i : 2 * i) * size;
      const int64_t at_2 = first + (kIsNeox ? i + half : 2 * i + 1) * size;
      const F32 c = broadcast(args.cos_table + i), s = broadcast(args.sin_table + i);
      rotate_dimensions(src + at_1, src + at_2, dst + at_1, dst + at_2, size, {c, c}, {s, s});
    }
    if (args.src != args.dst) {
      memcpy(dst, src, static_cast<size_t>(first) * sizeof(T));
      memcpy(dst + rest, src + rest,
             static_cast<size_t>(2 * args.row_size * size - rest) * sizeof(T));
    }
  }
}

// Keys of a head: [block_size / 16, head_dim / 2, 16 tokens, 2 dimensions]; its values follow.
template <typename T, bool kIsNeox>
void rotate_amx(const RotateArgs& by_reference) {
  constexpr int64_t kTileTokens = 16;
  constexpr int64_t kRow = 2 * kTileTokens;  // elements: two dimensions of a tile's tokens
  static_assert(Step<T>::kOrder == ElementOrder::kEvenOdd && Step<T>::kVectors == 2 &&
                kRow % kStepSize<T> == 0);
  const RotateArgs args = by_reference;
  const int64_t quarter = args.rotary_dim / 4;  // NeoX: rows between a dimension and its partner
  const int64_t tile_size = kTileTokens * args.row_size;
  const int64_t first = args.rotary_offset * kTileTokens;
  const int64_t rest = first + args.rotary_dim * kTileTokens;
  const bool copies = args.src != args.dst;
  for (int64_t head = 0; head < args.num_outer; ++head) {
    const T* src = static_cast<const T*>(args.src) + head * args.src_outer_stride;
    T* dst = static_cast<T*>(args.dst) + head * args.dst_outer_stride;
    for (int64_t tile = 0; tile < args.block_size / kTileTokens; ++tile) {
      if (copies) {
        memcpy(dst, src, static_cast<size_t>(first) * sizeof(T));
        memcpy(dst + rest, src + rest, static_cast<size_t>(tile_size - rest) * sizeof(T));
      }
      if constexpr (kIsNeox) {
        for (int64_t row = 0; row < quarter; ++row) {
          const int64_t at = first + row * kRow, partner = at + quarter * kRow;
          const float* cosines = args.cos_table + 2 * row;
          const float* sines = args.sin_table + 2 * row;
          rotate_dimensions(src + at, src + partner, dst + at, dst + partner, kRow,
                            {broadcast(cosines), broadcast(cosines + 1)},
                            {broadcast(sines), broadcast(sines + 1)});
        }
      } else {
        for (int64_t row = 0; row < args.rotary_dim / 2; ++row) {
          const F32 c = broadcast(args.cos_table + row), s = broadcast(args.sin_table + row);
          for (int64_t i = first + row * kRow; i < first + (row + 1) * kRow; i += kStepSize<T>) {
            F32 x[2];
            Step<T>::load(src + i, x);
            const F32 a = x[0], b = x[1];
            x[0] = a * c - b * s;
            x[1] = b * c + a * s;
            Step<T>::template store<false>(dst + i, x);
          }
        }
      }
      src += tile_size;
      dst += tile_size;
    }
    if (copies) {  // the values
      memcpy(dst, src, static_cast<size_t>(args.block_size * args.row_size) * sizeof(T));
    }
  }
}

}  // namespace
}  // namespace kvspan::cpu
