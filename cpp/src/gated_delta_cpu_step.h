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

// count elements from base + offset on, of any type, to floats and back.
inline void load_elements(StateType type, const void* base, int64_t offset, int64_t count,
                          float* dst) {
  switch (type) {
    case kStateBF16:
      return load_row(static_cast<const BFloat16*>(base) + offset, count, dst);
    case kStateF16:
      return load_row(static_cast<const Float16*>(base) + offset, count, dst);
    default:
      return load_row(static_cast<const float*>(base) + offset, count, dst);
  }
}

inline void store_elements(StateType type, const float* src, int64_t count, void* base,
                           int64_t offset) {
  switch (type) {
    case kStateBF16:
      return store_row(src, count, static_cast<BFloat16*>(base) + offset);
    case kStateF16:
      return store_row(src, count, static_cast<Float16*>(base) + offset);
    default:
      return store_row(src, count, static_cast<float*>(base) + offset);
  }
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
inline void load_keys(const GatedDeltaItem& item, const void* src, int64_t token_stride,
                      int64_t begin, int64_t count, int64_t padded_count, float factor,
                      float* dst) {
  for (int64_t i = 0; i < count; ++i) {
    float* row = dst + i * item.key_dim;
    load_elements(item.type, src, (begin + i) * token_stride, item.key_dim, row);
    normalize(row, item.key_dim, item.l2norm, factor);
  }
  memset(dst + count * item.key_dim, 0,
         static_cast<size_t>((padded_count - count) * item.key_dim) * sizeof(float));
}

inline void load_step_keys(const GatedDeltaItem& item, const GatedDeltaWorkspace& at,
                           int64_t token) {
  load_keys(item, item.k, item.k_token_stride, token, 1, 1, 1.0f, item.workspace + at.k);
  if (item.q) {
    load_keys(item, item.q, item.q_token_stride, token, 1, 1, item.scale, item.workspace + at.q);
  }
}

// A single token, by the recurrence itself: one pass to read, one to write. state and written are
// [key_dim, ...] of the strides; both may be the same; no state is zeros. q: null for no output.
template <int kVectors>
inline void step(const float* k, const float* q, int64_t key_dim, float alpha, float beta,
                 const float* state, int64_t state_stride, float* written, int64_t written_stride,
                 const float* values, float* outputs) {
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
    x[v] = beta * multiply_add(splat(-alpha), x[v], load(values + v * kWidth));
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
  for (int v = 0; v < kVectors; ++v) store_bits(outputs + v * kWidth, o[v]);
}

// One strip of columns of one head's token: read from state, written to written, as in step().
inline void step_strip(const GatedDeltaItem& item, const GatedDeltaWorkspace& at, int64_t head,
                       int64_t token, int64_t first_column, const float* state,
                       int64_t state_stride, float* written, int64_t written_stride) {
  const int64_t left = item.value_dim - first_column;
  const int64_t num_columns = left < kStrip ? left : kStrip;
  const float alpha = item.alpha[head * item.alpha_head_stride + token * item.alpha_token_stride];
  const float beta = item.beta[head * item.beta_head_stride + token * item.beta_token_stride];
  const float* k = item.workspace + at.k;
  const float* q = item.q ? item.workspace + at.q : nullptr;
  float* values = item.workspace + at.updates;
  float* outputs = item.workspace + at.outputs;
  memset(values, 0, kStrip * sizeof(float));
  load_elements(item.type, item.v,
                token * item.v_token_stride + head * item.v_head_stride + first_column, num_columns,
                values);
  for_column_blocks(round_up(num_columns, kWidth) / kWidth, [&]<int kVectors>(int64_t column) {
    step<kVectors>(k, q, item.key_dim, alpha, beta, state ? state + column : nullptr, state_stride,
                   written + column, written_stride, values + column, outputs + column);
  });
  if (!item.q) return;
  store_elements(item.type, outputs, num_columns, item.out,
                 token * item.out_token_stride + head * item.out_head_stride + first_column);
}

}  // namespace
}  // namespace kvspan::cpu
