// Keys and queries as the gated delta rule takes them, and the rule for a single token: decoding,
// and a chunk of one. Internal linkage only (see gated_delta_cpu.h).
#pragma once

#include "gated_delta_cpu.h"
#include "gated_delta_cpu_vector.h"

namespace kvspan::cpu {
namespace {

constexpr float kNormEps = 1e-6f;

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// x[0, count) times factor, and by 1 / sqrt(|x|^2 + eps) if so asked.
inline void normalize(float* x, int64_t count, bool l2norm, float factor) {
  int64_t i = 0;
  if (l2norm) {
    F32 sums{};
    for (; i + kWidth <= count; i += kWidth) sums = multiply_add(load(x + i), load(x + i), sums);
    float sum = kNormEps;
    for (int lane = 0; lane < kWidth; ++lane) sum += sums[lane];
    for (; i < count; ++i) sum += x[i] * x[i];
    factor *= 1.0f / __builtin_sqrtf(sum);
  } else if (factor == 1.0f) {
    return;
  }
  for (i = 0; i + kWidth <= count; i += kWidth) store_bits(x + i, load(x + i) * factor);
  for (; i < count; ++i) x[i] *= factor;
}

// Rows [begin, begin + count) of keys or queries, with rows of zeros up to padded_count behind.
template <typename T>
inline void load_keys(const GatedDeltaItem& item, const void* src, int64_t token_stride,
                      int64_t begin, int64_t count, int64_t padded_count, float factor,
                      float* dst) {
  for (int64_t i = 0; i < count; ++i) {
    float* row = dst + i * item.key_dim;
    load_row(static_cast<const T*>(src) + (begin + i) * token_stride, item.key_dim, row);
    normalize(row, item.key_dim, item.l2norm, factor);
  }
  memset(dst + count * item.key_dim, 0,
         static_cast<size_t>((padded_count - count) * item.key_dim) * sizeof(float));
}

template <typename T>
inline void load_step_keys(const GatedDeltaItem& item, const GatedDeltaWorkspace& at,
                           int64_t token) {
  load_keys<T>(item, item.k, item.k_token_stride, token, 1, 1, 1.0f, item.workspace + at.k);
  if (item.q) {
    load_keys<T>(item, item.q, item.q_token_stride, token, 1, 1, item.scale, item.workspace + at.q);
  }
}

// A single token, by the recurrence itself: one pass to read, one to write. state and written are
// [key_dim, ...] of the strides; both may be the same; no state is zeros. q: null for no output.
template <int kVectors>
inline void step(const float* k, const float* q, int64_t key_dim, float alpha, float beta,
                 const float* state, int64_t state_stride, float* written, int64_t written_stride,
                 const F32* values, F32* outputs) {
  F32 x[kVectors]{}, o[kVectors]{};
  if (state) {
    for (int64_t d = 0; d < key_dim; ++d) {
      const F32 key = broadcast(k + d);
      for (int v = 0; v < kVectors; ++v) {
        x[v] = multiply_add(key, load(state + d * state_stride + v * kWidth), x[v]);
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    x[v] = beta * multiply_add(splat(-alpha), x[v], values[v]);
  }
  for (int64_t d = 0; d < key_dim; ++d) {
    const F32 key = broadcast(k + d), query = q ? broadcast(q + d) : F32{};
    for (int v = 0; v < kVectors; ++v) {
      const F32 before = state ? alpha * load(state + d * state_stride + v * kWidth) : F32{};
      const F32 after = multiply_add(key, x[v], before);
      store_bits(written + d * written_stride + v * kWidth, after);
      o[v] = multiply_add(query, after, o[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) outputs[v] = o[v];
}

// num_columns columns of one head's token: read from state, written to written, as in step().
template <typename T>
inline void step_columns(const GatedDeltaItem& item, const GatedDeltaWorkspace& at, int64_t head,
                         int64_t token, int64_t first_column, int64_t num_columns,
                         const float* state, int64_t state_stride, float* written,
                         int64_t written_stride) {
  const float alpha = item.alpha[head * item.alpha_head_stride + token * item.alpha_token_stride];
  const float beta = item.beta[head * item.beta_head_stride + token * item.beta_token_stride];
  const T* values = static_cast<const T*>(item.v) + token * item.v_token_stride +
                    head * item.v_head_stride + first_column;
  T* out = item.q ? static_cast<T*>(item.out) + token * item.out_token_stride +
                        head * item.out_head_stride + first_column
                  : nullptr;
  const float* k = item.workspace + at.k;
  const float* q = item.q ? item.workspace + at.q : nullptr;
  for_column_blocks(round_up(num_columns, kWidth) / kWidth, [&]<int kVectors>(int64_t column) {
    F32 v[kVectors], o[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      const int64_t from = column + i * kWidth;
      v[i] = load_up_to(values + from, num_columns - from);
    }
    step<kVectors>(k, q, item.key_dim, alpha, beta, state ? state + column : nullptr, state_stride,
                   written + column, written_stride, v, o);
    for (int i = 0; out && i < kVectors; ++i) {
      const int64_t from = column + i * kWidth;
      store_up_to(out + from, o[i], num_columns - from);
    }
  });
}

}  // namespace
}  // namespace kvspan::cpu
