// Fetching the block to come, for the rerope kernels. Everything has internal linkage (see
// rerope_cpu.h).
#pragma once

#include <stdint.h>

#include "rerope_cpu.h"

namespace kvspan::cpu {
namespace {

// Fetches elements of another block. Blocks lie anywhere in memory, so the hardware prefetcher
// starts anew in each, and conversions leave too few loads in flight to hide that. Always inlined:
// GCC takes a function that does nothing else for one without effect, and drops its calls.
template <typename T>
[[gnu::always_inline]] inline void prefetch(const void* block, int64_t first, int64_t count) {
  constexpr int64_t kCacheLine = 64;
  const char* at = reinterpret_cast<const char*>(static_cast<const T*>(block) + first);
  for (int64_t byte = 0; byte < count * static_cast<int64_t>(sizeof(T)); byte += kCacheLine) {
    __builtin_prefetch(at + byte);
  }
}

// Fetches the row of the block to come that lies src elements into it, and of its destination.
template <typename T, bool kStream>
[[gnu::always_inline]] inline void prefetch_next(const RotateArgs& args, int64_t src, int64_t dst) {
  if (!args.next_src) return;
  const bool in_place = args.src == args.dst;  // only what is rotated is touched
  const int64_t first = in_place ? args.rotary_offset : 0;
  const int64_t count = in_place ? args.rotary_dim : args.row_size;
  prefetch<T>(args.next_src, src + first, count);
  if (!in_place && !kStream) prefetch<T>(args.next_dst, dst, count);
}

}  // namespace
}  // namespace kvspan::cpu
