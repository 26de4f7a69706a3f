// Rows of 8-bit floats, in stages: taking the codes apart, rotation and rounding, putting codes
// together. From a number's code to that of its rotation some 40 cycles pass, and a row has more
// instructions than a processor holds ready to start in that time. So each turn of the loop works
// on three units of a row, or of two, a stage each, that do not wait for each other.
//
// Internal linkage; see rerope_cpu.h.
#pragma once

#include "rerope_cpu.h"
#include "rerope_cpu_float8.h"
#include "rerope_cpu_prefetch.h"

#if defined(__AVX512VBMI__)

namespace kvspan::cpu {
namespace {

// Elements that rotate at a time: two steps.
template <typename T>
inline constexpr int64_t kUnitSize = 2 * kStepSize<T>;

// Rows one after the other, whatever their strides.
struct RowWalk {
  int64_t inner = 0, src = 0, dst = 0;  // of the row; offsets in elements

  void next(const RotateArgs& args) {
    src += args.src_inner_stride;
    dst += args.dst_inner_stride;
    if (++inner < args.num_inner) return;
    src += args.src_outer_stride - args.num_inner * args.src_inner_stride;
    dst += args.dst_outer_stride - args.num_inner * args.dst_inner_stride;
    inner = 0;
  }
};

// The first halves of two vectors, and the second ones.
inline void exchange_halves(Bytes* a, Bytes* b) {
  const Bytes first = _mm512_maskz_shuffle_i64x2(0xff, *a, *b, 0x44);
  *b = _mm512_maskz_shuffle_i64x2(0xff, *a, *b, 0xee);
  *a = first;
}

// Each table entry of the first half of a step, for the second half as well.
template <typename T>
inline void repeat_half(const float* table, float* repeated) {
  for (int v = 0; v < Step<T>::kVectors; ++v) {
    auto half = (__m512i)load(table + v * kWidth), same = half;
    exchange_halves(&half, &same);
    store_bits(repeated + v * kWidth, half);
  }
}

// kIsRowPair: rotary_dim is a step, and the number of rows even; else it is a multiple of a unit.
template <typename T, bool kIsNeox, bool kStream, bool kIsRowPair>
void rotate_rows_in_stages(const RotateArgs& by_reference) {
  const RotateArgs args = by_reference;  // a copy, which stores through dst cannot alias
  constexpr int kVectors = Step<T>::kVectors;
  constexpr int64_t kSize = kStepSize<T>;
  constexpr bool kExchanges = kIsNeox && kIsRowPair;  // so that a step holds halves of one kind

  const float* cos_table = args.cos_table;
  const float* sin_table = args.sin_table;
  alignas(64) float repeated[2][kSize];
  if constexpr (kExchanges) {
    repeat_half<T>(cos_table, repeated[0]);
    repeat_half<T>(sin_table, repeated[1]);
    cos_table = repeated[0];
    sin_table = repeated[1];
  }

  struct Unit {
    T* out_1 = nullptr;
    T* out_2 = nullptr;
    int64_t angle = 0;  // of the table entries of the first step
  };
  struct {
    Unit unit;
    typename Step<T>::Halves step_1{}, step_2{};
  } loaded;
  struct {
    Unit unit;
    typename Step<T>::Rounded step_1{}, step_2{};
  } rotated;

  const int64_t num_rows = args.num_outer * args.num_inner;
  const int64_t units_per_row = kIsRowPair ? 1 : args.rotary_dim / kUnitSize<T>;
  const int64_t num_units = kIsRowPair ? num_rows / 2 : num_rows * units_per_row;
  const T* from = static_cast<const T*>(args.src) + args.rotary_offset;
  T* to = static_cast<T*>(args.dst) + args.rotary_offset;
  RowWalk row;
  int64_t unit_in_row = 0;
  const T* in_1 = from;
  const T* in_2 = from;
  for (int64_t i = 0; i < num_units + 2; ++i) {  // two more to end the last ones
    Unit unit;
    if (i < num_units) {
      if (unit_in_row == 0) prefetch_next<T, kStream>(args, row.src, row.dst);
      if constexpr (kIsRowPair) {
        in_1 = from + row.src;
        unit.out_1 = to + row.dst;
        row.next(args);
        prefetch_next<T, kStream>(args, row.src, row.dst);
        in_2 = from + row.src;
        unit.out_2 = to + row.dst;
        row.next(args);
      } else {
        unit.angle = unit_in_row * (kIsNeox ? kSize : kUnitSize<T>);
        const int64_t partner = kIsNeox ? args.rotary_dim / 2 : kSize;
        in_1 = from + row.src + unit.angle;
        in_2 = in_1 + partner;
        unit.out_1 = to + row.dst + unit.angle;
        unit.out_2 = unit.out_1 + partner;
        if (++unit_in_row == units_per_row) {
          unit_in_row = 0;
          row.next(args);
        }
      }
    }

    F32 x_1[kVectors], x_2[kVectors];
    Step<T>::widen(loaded.step_1, x_1);
    Step<T>::widen(loaded.step_2, x_2);
    const int64_t angle = loaded.unit.angle;
    const Unit to_round = loaded.unit;

    Bytes code_1 = load_bytes(in_1), code_2 = load_bytes(in_2);
    if constexpr (kExchanges) exchange_halves(&code_1, &code_2);
    loaded.step_1 = Step<T>::take_apart(code_1);
    loaded.step_2 = Step<T>::take_apart(code_2);
    loaded.unit = unit;

    for (int v = 0; v < kVectors; ++v) {
      const F32 a = x_1[v], b = x_2[v];
      const F32 c = load(cos_table + angle + v * kWidth);
      const F32 s = load(sin_table + angle + v * kWidth);
      if constexpr (kIsNeox) {
        x_1[v] = a * c - b * s;
        x_2[v] = b * c + a * s;
      } else {
        const int64_t angle_2 = kIsRowPair ? 0 : angle + kSize;
        const F32 c_2 = load(cos_table + angle_2 + v * kWidth);
        const F32 s_2 = load(sin_table + angle_2 + v * kWidth);
        x_1[v] = a * c + swap_pairs(a) * s;
        x_2[v] = b * c_2 + swap_pairs(b) * s_2;
      }
    }

    if (rotated.unit.out_1) {
      code_1 = Step<T>::pick(rotated.step_1);
      code_2 = Step<T>::pick(rotated.step_2);
      if constexpr (kExchanges) exchange_halves(&code_1, &code_2);
      put<kStream>(rotated.unit.out_1, code_1);
      put<kStream>(rotated.unit.out_2, code_2);
    }
    rotated.step_1 = Step<T>::round(x_1);
    rotated.step_2 = Step<T>::round(x_2);
    rotated.unit = to_round;
  }
}

}  // namespace
}  // namespace kvspan::cpu

#endif
