// Rows of 8-bit floats, in stages: taking the codes apart, rotation, rounding, putting codes
// together. From a number's code to that of its rotation some 40 cycles pass, and a row has more
// instructions than a processor holds ready to start in that time, half of them where two threads
// share a core. So each turn of the loop works on three rows, a stage each, that do not wait for
// each other; and it takes a row in two parts, one being rotated while the other is rounded, so
// that what passes from turn to turn stays in registers.
//
// Internal linkage; see rerope_cpu.h.
#pragma once

#include "rerope_cpu.h"
#include "rerope_cpu_float8.h"
#include "rerope_cpu_prefetch.h"

#if defined(__AVX512VBMI__)

namespace kvspan::cpu {
namespace {

constexpr int64_t kFloat8Step = kStepSize<Float8E4M3>;  // elements, which are bytes

// Where the rows of a block begin, one after the other.
struct RowWalk {
  int64_t step, wrap;  // to the next row; in addition where an inner dimension ends
  int64_t num_inner, left;

  RowWalk(int64_t outer_stride, int64_t inner_stride, int64_t num_inner)
      : step(inner_stride),
        wrap(outer_stride - num_inner * inner_stride),
        num_inner(num_inner),
        left(num_inner) {}

  int64_t next() {
    if (--left > 0) return step;
    left = num_inner;
    return step + wrap;
  }
};

// A vector from two halves: cheaper than exchange_halves() once they are loaded.
inline Bytes load_halves(const void* a, const void* b) {
  return _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(load_bits<__m256i>(a)),
                                  load_bits<__m256i>(b), 1);
}

// The first halves of two vectors, and the second ones.
inline void exchange_halves(Bytes* a, Bytes* b) {
  const Bytes first = _mm512_maskz_shuffle_i64x2(0xff, *a, *b, 0x44);
  *b = _mm512_maskz_shuffle_i64x2(0xff, *a, *b, 0xee);
  *a = first;
}

// Two steps of each row, from `at` elements into it on; NeoX: a step and its partners.
// kIsRowPair: a step of each row, two rows at a time. S: a Step, or a PairStep where pairs are
// neighbours. kHasRest: what is not rotated is copied later.
template <typename S, bool kStream, bool kIsRowPair, bool kHasRest>
inline void rotate_columns(const RotateArgs& args, int64_t at, const float* cos_table,
                           const float* sin_table) {
  constexpr bool kIsNeox = !S::kSplitsPairs;
  const auto bytes_between = [](const void* from, const void* to) {
    return reinterpret_cast<intptr_t>(to) - reinterpret_cast<intptr_t>(from);
  };
  // To the same place in the block to come.
  const int64_t src_ahead = args.next_src ? bytes_between(args.src, args.next_src) : 0;
  const int64_t dst_ahead = args.next_src ? bytes_between(args.dst, args.next_dst) : 0;
  const int64_t partner = kIsNeox ? args.rotary_dim / 2 : kFloat8Step;  // of a row's first step
  // Of the second step; that of another row has the same.
  const int64_t table_partner = kIsNeox || kIsRowPair ? 0 : kFloat8Step / 2;

  const char* in = static_cast<const char*>(args.src) + at;
  char* out = static_cast<char*>(args.dst) + at;
  RowWalk src(args.src_outer_stride, args.src_inner_stride, args.num_inner);
  RowWalk dst(args.dst_outer_stride, args.dst_inner_stride, args.num_inner);
  const int64_t num_turns = args.num_outer * args.num_inner / (kIsRowPair ? 2 : 1);
  int64_t loads_left = num_turns;

  // Between stages.
  typename S::Halves loaded[2]{};
  F32 x[4]{};  // the second part: two vectors, and their partners
  typename S::Rounded rounded[2]{};

  const auto load_row = [&] {
    const char* in_1 = in;
    const char* in_2 = in + partner;
    if (kIsRowPair) in_2 = in_1 + src.next();
    Bytes code_1, code_2;
    if constexpr (kIsNeox && kIsRowPair) {  // so that a step holds halves of one kind
      code_1 = load_halves(in_1, in_2);
      code_2 = load_halves(in_1 + kFloat8Step / 2, in_2 + kFloat8Step / 2);
    } else {
      code_1 = load_bytes(in_1);
      code_2 = load_bytes(in_2);
    }
    loaded[0] = S::take_apart(code_1);
    loaded[1] = S::take_apart(code_2);
    __builtin_prefetch(in_1 + src_ahead);
    __builtin_prefetch(in_2 + src_ahead);
    if constexpr (kHasRest) {
      prefetch<char>(in_1 + src_ahead, -args.rotary_offset, args.row_size);
      if (kIsRowPair) prefetch<char>(in_2 + src_ahead, -args.rotary_offset, args.row_size);
    }
    // After the last one the same again, which nothing comes of.
    if (--loads_left > 0) in = in_2 - (kIsRowPair ? 0 : partner) + src.next();
  };
  // Half of the row that is taken apart: of each step two vectors.
  const auto rotate_part = [&](int part, F32* y) {
    for (int i = 0; i < 2; ++i) {
      const int v = 2 * part + i;
      const F32 a = kIsNeox ? S::widen(loaded[0], v) : S::widen(loaded[i], part);
      const F32 b = kIsNeox ? S::widen(loaded[1], v) : S::widen(loaded[i], part + 2);
      const int64_t angle = kIsNeox ? v * kWidth : i * table_partner + part * kWidth;
      const F32 c = load(cos_table + angle), s = load(sin_table + angle);
      y[i] = a * c - b * s;
      y[i + 2] = b * c + a * s;
    }
  };
  // What rotate_part made of step i.
  const auto round_part = [&](int i, const F32* y) {
    return kIsNeox ? S::pair_up(S::round(y[2 * i]), S::round(y[2 * i + 1]))
                   : S::pair_up(S::round(y[i]), S::round(y[i + 2]));
  };
  const auto store_row = [&] {
    char* out_1 = out;
    char* out_2 = out + partner;
    if (kIsRowPair) out_2 = out_1 + dst.next();
    Bytes code_1 = S::pick(rounded[0]), code_2 = S::pick(rounded[1]);
    if (kIsNeox && kIsRowPair) exchange_halves(&code_1, &code_2);
    put<kStream>(out_1, code_1);
    put<kStream>(out_2, code_2);
    if (!kStream) {
      __builtin_prefetch(out_1 + dst_ahead);
      __builtin_prefetch(out_2 + dst_ahead);
    }
    out = out_2 - (kIsRowPair ? 0 : partner) + dst.next();
  };
  const auto turn = [&]<bool kStores>() {
    F32 first_part[4];
    rotate_part(0, first_part);
    for (int i = 0; i < 2; ++i) rounded[i].second = round_part(i, x);
    rotate_part(1, x);
    load_row();
    if (kStores) store_row();
    for (int i = 0; i < 2; ++i) rounded[i].first = round_part(i, first_part);
  };
  for (int i = 0; i < 2; ++i) turn.template operator()<false>();  // nothing to store yet
  for (int64_t i = 0; i < num_turns; ++i) turn.template operator()<true>();
}

// kIsRowPair: rotary_dim is a step, and the number of rows even; else it is a multiple of two.
template <typename S, bool kStream, bool kIsRowPair, bool kHasRest>
void rotate_rows_in_stages(const RotateArgs& by_reference) {
  const RotateArgs args = by_reference;  // a copy, which stores through dst cannot alias
  constexpr bool kIsNeox = !S::kSplitsPairs;
  // Two steps have as many angles as one has elements.
  for (int64_t i = 0; i < args.rotary_dim / 2; i += kFloat8Step) {
    rotate_columns<S, kStream, kIsRowPair, kHasRest>(
        args, args.rotary_offset + (kIsNeox ? i : 2 * i), args.cos_table + i, args.sin_table + i);
  }
}

// Whether it did.
template <typename S, bool kStream>
inline bool try_rotate_rows_in_stages(const RotateArgs& args) {
  const int64_t num_rows = args.num_outer * args.num_inner;
  if (num_rows == 0) return true;
  const bool is_row_pair = args.rotary_dim == kFloat8Step && num_rows % 2 == 0;
  if (!is_row_pair && args.rotary_dim % (2 * kFloat8Step) != 0) return false;
  const bool has_rest = args.src != args.dst && args.row_size != args.rotary_dim;
  if (is_row_pair) {
    has_rest ? rotate_rows_in_stages<S, kStream, true, true>(args)
             : rotate_rows_in_stages<S, kStream, true, false>(args);
  } else {
    has_rest ? rotate_rows_in_stages<S, kStream, false, true>(args)
             : rotate_rows_in_stages<S, kStream, false, false>(args);
  }
  return true;
}

}  // namespace
}  // namespace kvspan::cpu

#endif
