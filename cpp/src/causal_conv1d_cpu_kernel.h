// The causal convolution; see kvspan/causal_conv1d.h. Include this from one source file per
// instruction set only; everything has internal linkage (see gated_delta_cpu.h).
#pragma once

#include "gated_delta_cpu.h"
#include "gated_delta_cpu_vector.h"

namespace kvspan::cpu {
namespace {

// exp(x) for x <= 0, within 2 units in the last place; 0 below -87.
inline F32 exp_of_negative(F32 x) {
  constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  const F32 smallest = splat(-87.0f);
  const F32 clamped = x < smallest ? smallest : x;
  const F32 magic = splat(0x1.8p23f);  // adding it rounds to an integer, in its lowest bits
  const F32 shifted = clamped * kLog2e + magic;
  const F32 n = shifted - magic;
  const F32 r = multiply_add(n, splat(-kLn2Low), multiply_add(n, splat(-kLn2High), clamped));
  constexpr float kPolynomial[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                   4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  F32 p{};
  for (const float c : kPolynomial) p = multiply_add(p, r, splat(c));
  p = multiply_add(p * r, r, r) + 1.0f;
  const F32 power = (F32)(((U32)shifted << 23) + (127u << 23));  // 2^n
  return x < smallest ? F32{} : p * power;
}

// y / (1 + exp(-y)), without overflow on either side; NaN stays NaN.
inline F32 silu(F32 y) {
  const F32 e = exp_of_negative(y < 0.0f ? y : -y);
  return y * (y < 0.0f ? e : F32{} + 1.0f) / (1.0f + e);
}

// num_tokens rows of one vector of channels; rows before the first come from item.previous.
template <typename T>
inline void convolve_columns(const ConvItem& item, int64_t column, int64_t count) {
  const auto load_from = [&](const T* p) { return load_up_to(p, count); };
  const int64_t width = item.width;
  const T* x = static_cast<const T*>(item.x) + column;
  const T* previous = static_cast<const T*>(item.previous) + column;
  T* out = static_cast<T*>(item.out) + column;
  const T* weights = static_cast<const T*>(item.weight) + column;
  F32 weight[16], window[16];
  for (int64_t w = 0; w < width; ++w) {
    weight[w] = load_from(weights + w * item.weight_stride);
    if (w + 1 < width) window[w + 1] = load_from(previous + w * item.previous_stride);
  }
  const F32 bias = item.bias ? load_from(static_cast<const T*>(item.bias) + column) : F32{};
  for (int64_t t = 0; t < item.num_tokens; ++t) {
    for (int64_t w = 0; w + 1 < width; ++w) window[w] = window[w + 1];
    window[width - 1] = load_from(x + t * item.x_token_stride);
    F32 y = bias;
    for (int64_t w = 0; w < width; ++w) y = multiply_add(weight[w], window[w], y);
    if (item.silu) y = silu(y);
    store_up_to(out + t * item.out_token_stride, y, count);
  }
}

// Vectors of one pass: with tokens far apart, each line of the cache should be met once only.
template <typename T>
constexpr int kConvVectors = 64 / (static_cast<int>(sizeof(T)) * kWidth) > 1 ? 2 : 1;

// Width 4, as models have it: the window stays in registers.
template <typename T>
inline void convolve_columns_4(const ConvItem& item, int64_t column) {
  constexpr int kVectors = kConvVectors<T>;
  const T* x = static_cast<const T*>(item.x) + column;
  const T* previous = static_cast<const T*>(item.previous) + column;
  const T* weights = static_cast<const T*>(item.weight) + column;
  T* out = static_cast<T*>(item.out) + column;
  F32 weight[4][kVectors], window[3][kVectors], bias[kVectors]{};
  for (int v = 0; v < kVectors; ++v) {
    for (int w = 0; w < 4; ++w) {
      weight[w][v] = load_lanes(weights + w * item.weight_stride + v * kWidth);
      if (w < 3) window[w][v] = load_lanes(previous + w * item.previous_stride + v * kWidth);
    }
    if (item.bias) bias[v] = load_lanes(static_cast<const T*>(item.bias) + column + v * kWidth);
  }
  for (int64_t t = 0; t < item.num_tokens; ++t) {
    for (int v = 0; v < kVectors; ++v) {
      const F32 last = load_lanes(x + t * item.x_token_stride + v * kWidth);
      F32 y = multiply_add(weight[0][v], window[0][v], bias[v]);
      y = multiply_add(weight[1][v], window[1][v], y);
      y = multiply_add(weight[2][v], window[2][v], y);
      y = multiply_add(weight[3][v], last, y);
      window[0][v] = window[1][v];
      window[1][v] = window[2][v];
      window[2][v] = last;
      store_lanes(out + t * item.out_token_stride + v * kWidth, item.silu ? silu(y) : y);
    }
  }
}

template <typename T>
void run_conv(const ConvItem& item) {
  constexpr int64_t kColumns = kConvVectors<T> * kWidth;
  int64_t column = 0;
  for (; item.width == 4 && column + kColumns <= item.num_channels; column += kColumns) {
    convolve_columns_4<T>(item, column);
  }
  for (; column < item.num_channels; column += kWidth) {
    const int64_t left = item.num_channels - column;
    convolve_columns<T>(item, column, left < kWidth ? left : kWidth);
  }
}

}  // namespace
}  // namespace kvspan::cpu
