// The rerope kernels of vLLM's packed CPU layouts (KvLayout::kCpuVec, kCpuAmx), where tokens lie
// side by side and a vector holds one dimension, or a pair of them, of many tokens. Internal
// linkage; see rerope_cpu.h.
#pragma once

#include "rerope_cpu.h"
#include "rerope_cpu_vector.h"

namespace kvspan::cpu {
namespace {

// Rotates count elements of one dimension against those of its partner, all by one angle.
template <typename T>
inline void rotate_dimensions(const T* in_1, const T* in_2, T* out_1, T* out_2, int64_t count,
                              F32 c, F32 s) {
  const auto rotate = [&](const T* a, const T* b, T* to_a, T* to_b) {
    const F32 x_1 = load(a), x_2 = load(b);
    store(to_a, x_1 * c - x_2 * s);
    store(to_b, x_2 * c + x_1 * s);
  };
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) rotate(in_1 + i, in_2 + i, out_1 + i, out_2 + i);
  if (i < count) {
    const size_t rest_bytes = static_cast<size_t>(count - i) * sizeof(T);
    T part_1[kWidth] = {}, part_2[kWidth] = {};
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
      // The interleaved tables hold each frequency twice, the plain sine second.
      const F32 c = broadcast(args.cos_table + (kIsNeox ? i : 2 * i));
      const F32 s = broadcast(args.sin_table + (kIsNeox ? i : 2 * i + 1));
      rotate_dimensions(src + at_1, src + at_2, dst + at_1, dst + at_2, size, c, s);
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
  static_assert(kRow % kWidth == 0);
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
          rotate_dimensions(src + at, src + partner, dst + at, dst + partner, kRow,
                            broadcast_pair(args.cos_table + 2 * row),
                            broadcast_pair(args.sin_table + 2 * row));
        }
      } else {
        for (int64_t row = 0; row < args.rotary_dim / 2; ++row) {
          const F32 c = broadcast_pair(args.cos_table + 2 * row);
          const F32 s = broadcast_pair(args.sin_table + 2 * row);
          for (int64_t i = first + row * kRow; i < first + (row + 1) * kRow; i += kWidth) {
            const F32 x = load(src + i);
            store(dst + i, x * c + swap_pairs(x) * s);
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
