// The gated delta rule by chunks; see kvspan/gated_delta.h for the equations. Include this from one
// source file per instruction set only; everything has internal linkage (see gated_delta_cpu.h).
//
// Value dimensions are independent, so the state is kept and worked on by strips of kStrip columns,
// each of which stays in the first cache with the chunk's updates. The system is solved by forward
// substitution, a block of rows at a time, in the same pass that makes its right-hand side.
#pragma once

#include "gated_delta_cpu.h"
#include "gated_delta_cpu_step.h"
#include "gated_delta_cpu_vector.h"

namespace kvspan::cpu {
namespace {

// dst[i][j] = left_i . right_j for j <= i (and some more), from right's transpose.
inline void multiply_keys(const float* left, const float* right_transposed, int64_t key_dim,
                          int64_t padded_count, float* dst) {
  for (int64_t i = 0; i < padded_count; i += kBlockRows) {
    const int64_t num_vectors = round_up(i + kBlockRows, kWidth) / kWidth;
    for_column_blocks(num_vectors, [&]<int kVectors>(int64_t j) {
      Block<kBlockRows, kVectors> block{};
      multiply<kBlockRows, kVectors>(block, left + i * key_dim, key_dim, 1, right_transposed + j,
                                     kChunk, key_dim);
      for (int r = 0; r < kBlockRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          store_bits(dst + (i + r) * kChunk + j + v * kWidth, block[r][v]);
        }
      }
    });
  }
}

// What one value head needs of a chunk besides its keys.
struct ChunkHead {
  int64_t count, padded_count;
  const float* k;        // [padded_count, key_dim]
  const float* q;        // the same; null: no outputs
  const float* system;   // [kChunk, kChunk], -beta_i (k_i . k_j) D_ij for j < i
  const float* weights;  // [kChunk, kChunk], (q_i . k_j) D_ij for j <= i
  const float* beta;     // [kChunk]
  const float* prefix;   // [kChunk], P_i
  const float* to_end;   // [kChunk], D_last,i
  float* updates;        // [kChunk, kStrip]
  float* outputs;        // [kChunk, kStrip]
};

// Fills system, weights, beta, prefix and to_end, of which decay holds the last three.
inline ChunkHead prepare_head(const GatedDeltaItem& item, int64_t head, int64_t begin,
                              int64_t count, const GatedDeltaWorkspace& at) {
  float* base = item.workspace;
  float* beta = base + at.decay;
  float* prefix = beta + kChunk;
  float* decay = prefix + kChunk;  // row i of D, in place
  const float* alpha = item.alpha + head * item.alpha_head_stride + begin * item.alpha_token_stride;
  const float* betas = item.beta + head * item.beta_head_stride + begin * item.beta_token_stride;
  memset(beta, 0, 3 * kChunk * sizeof(float));
  float product = 1.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float a = alpha[i * item.alpha_token_stride];
    beta[i] = betas[i * item.beta_token_stride];
    prefix[i] = product *= a;
    const float* gram = base + at.gram + i * kChunk;
    const float* scores = base + at.scores + i * kChunk;
    float* system = base + at.system + i * kChunk;
    float* weights = base + at.weights + i * kChunk;
    const F32 negative_beta = splat(-beta[i]);
    for (int64_t j = 0; j < i; j += kWidth) store_bits(decay + j, load(decay + j) * a);
    decay[i] = 1.0f;
    for (int64_t j = 0; j <= i; j += kWidth) {
      const F32 d = load(decay + j);
      store_bits(system + j, negative_beta * (load(gram + j) * d));
      if (item.q) store_bits(weights + j, load(scores + j) * d);
    }
  }
  const int64_t padded_count = round_up(count, kBlockRows);
  for (int64_t i = count; i < padded_count; ++i) {
    memset(base + at.system + i * kChunk, 0, kChunk * sizeof(float));
    memset(base + at.weights + i * kChunk, 0, kChunk * sizeof(float));
  }
  return {.count = count,
          .padded_count = padded_count,
          .k = base + at.k,
          .q = item.q ? base + at.q : nullptr,
          .system = base + at.system,
          .weights = base + at.weights,
          .beta = beta,
          .prefix = prefix,
          .to_end = decay,
          .updates = base + at.updates,
          .outputs = base + at.outputs};
}

// Columns of values become columns of updates, block of rows by block of rows.
template <int kVectors>
inline void solve(const ChunkHead& head, int64_t key_dim, const float* state, int64_t column) {
  for (int64_t i = 0; i < head.padded_count; i += kBlockRows) {
    Block<kBlockRows, kVectors> x{};
    multiply<kBlockRows, kVectors>(x, head.k + i * key_dim, key_dim, 1, state + column, kStrip,
                                   key_dim);
    float* rows = head.updates + i * kStrip + column;
    for (int r = 0; r < kBlockRows; ++r) {
      const F32 beta = broadcast(head.beta + i + r);
      const F32 negative_prefix = -broadcast(head.prefix + i + r);
      for (int v = 0; v < kVectors; ++v) {
        x[r][v] =
            beta * multiply_add(negative_prefix, x[r][v], load(rows + r * kStrip + v * kWidth));
      }
    }
    const float* system = head.system + i * kChunk;
    multiply<kBlockRows, kVectors>(x, system, kChunk, 1, head.updates + column, kStrip, i);
    multiply_corner<false, kVectors>(x, system + i, kChunk, x);
    for (int r = 0; r < kBlockRows; ++r) {
      for (int v = 0; v < kVectors; ++v) store_bits(rows + r * kStrip + v * kWidth, x[r][v]);
    }
  }
}

// Columns of outputs, from those of updates.
template <int kVectors>
inline void read_state(const ChunkHead& head, int64_t key_dim, const float* state, int64_t column) {
  for (int64_t i = 0; i < head.padded_count; i += kBlockRows) {
    Block<kBlockRows, kVectors> o{}, x;
    multiply<kBlockRows, kVectors>(o, head.q + i * key_dim, key_dim, 1, state + column, kStrip,
                                   key_dim);
    for (int r = 0; r < kBlockRows; ++r) {
      const F32 prefix = broadcast(head.prefix + i + r);
      for (int v = 0; v < kVectors; ++v) {
        o[r][v] *= prefix;
        x[r][v] = load(head.updates + (i + r) * kStrip + column + v * kWidth);
      }
    }
    const float* weights = head.weights + i * kChunk;
    multiply<kBlockRows, kVectors>(o, weights, kChunk, 1, head.updates + column, kStrip, i);
    multiply_corner<true, kVectors>(o, weights + i, kChunk, x);
    float* rows = head.outputs + i * kStrip + column;
    for (int r = 0; r < kBlockRows; ++r) {
      for (int v = 0; v < kVectors; ++v) store_bits(rows + r * kStrip + v * kWidth, o[r][v]);
    }
  }
}

template <int kRows, int kVectors>
inline void update_rows(const ChunkHead& head, int64_t key_dim, float* state, int64_t column,
                        int64_t row) {
  Block<kRows, kVectors> s;
  const F32 decay = broadcast(head.prefix + head.count - 1);
  float* rows = state + row * kStrip + column;
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) s[r][v] = decay * load(rows + r * kStrip + v * kWidth);
  }
  multiply<kRows, kVectors>(s, head.k + row, 1, key_dim, head.updates + column, kStrip, head.count);
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store_bits(rows + r * kStrip + v * kWidth, s[r][v]);
  }
}

template <int kVectors>
inline void update_state(const ChunkHead& head, int64_t key_dim, float* state, int64_t column) {
  for (int64_t i = 0; i < head.count; ++i) {
    const F32 to_end = broadcast(head.to_end + i);
    for (int v = 0; v < kVectors; ++v) {
      float* x = head.updates + i * kStrip + column + v * kWidth;
      store_bits(x, load(x) * to_end);
    }
  }
  int64_t row = 0;
  for (; row + kBlockRows <= key_dim; row += kBlockRows) {
    update_rows<kBlockRows, kVectors>(head, key_dim, state, column, row);
  }
  for (; row < key_dim; ++row) update_rows<1, kVectors>(head, key_dim, state, column, row);
}

inline void run_chunk_head(const GatedDeltaItem& item, const GatedDeltaWorkspace& at, int64_t head,
                           int64_t begin, int64_t count, float* state) {
  const ChunkHead chunk = prepare_head(item, head, begin, count, at);
  for (int64_t first = 0; first < item.value_dim; first += kStrip, state += item.key_dim * kStrip) {
    const int64_t left = item.value_dim - first;
    const int64_t num_columns = left < kStrip ? left : kStrip;
    const int64_t padded = round_up(num_columns, kWidth);
    for (int64_t i = 0; i < chunk.padded_count; ++i) {
      float* row = chunk.updates + i * kStrip;
      if (i >= count || num_columns < padded) {
        memset(row, 0, static_cast<size_t>(padded) * sizeof(float));
      }
      if (i >= count) continue;
      load_elements(item.type, item.v,
                    (begin + i) * item.v_token_stride + head * item.v_head_stride + first,
                    num_columns, row);
    }
    for_column_blocks(padded / kWidth, [&]<int kVectors>(int64_t column) {
      solve<kVectors>(chunk, item.key_dim, state, column);
      if (chunk.q) read_state<kVectors>(chunk, item.key_dim, state, column);
      update_state<kVectors>(chunk, item.key_dim, state, column);
    });
    for (int64_t i = 0; chunk.q && i < count; ++i) {
      store_elements(item.type, chunk.outputs + i * kStrip, num_columns, item.out,
                     (begin + i) * item.out_token_stride + head * item.out_head_stride + first);
    }
  }
}

// Between a state as the caller has it and the strips of the workspace.
inline void load_state(const GatedDeltaItem& item, int64_t head, float* strips) {
  for (int64_t first = 0; first < item.value_dim;
       first += kStrip, strips += item.key_dim * kStrip) {
    const int64_t left = item.value_dim - first;
    const int64_t num_columns = left < kStrip ? left : kStrip;
    if (!item.initial_state || num_columns < kStrip) {
      memset(strips, 0, static_cast<size_t>(item.key_dim * kStrip) * sizeof(float));
      if (!item.initial_state) continue;
    }
    const float* src = item.initial_state + head * item.initial_head_stride;
    if (item.is_value_key) {
      transpose(src + first * item.initial_row_stride, item.initial_row_stride, strips, kStrip,
                num_columns, item.key_dim);
      continue;
    }
    for (int64_t d = 0; d < item.key_dim; ++d) {
      memcpy(strips + d * kStrip, src + d * item.initial_row_stride + first,
             static_cast<size_t>(num_columns) * sizeof(float));
    }
  }
}

inline void store_state(const GatedDeltaItem& item, int64_t head, const float* strips) {
  for (int64_t first = 0; first < item.value_dim;
       first += kStrip, strips += item.key_dim * kStrip) {
    const int64_t left = item.value_dim - first;
    const int64_t num_columns = left < kStrip ? left : kStrip;
    float* dst = item.final_state + head * item.final_head_stride;
    if (item.is_value_key) {
      transpose(strips, kStrip, dst + first * item.final_row_stride, item.final_row_stride,
                item.key_dim, num_columns);
      continue;
    }
    for (int64_t d = 0; d < item.key_dim; ++d) {
      memcpy(dst + d * item.final_row_stride + first, strips + d * kStrip,
             static_cast<size_t>(num_columns) * sizeof(float));
    }
  }
}

void run_gated_delta(const GatedDeltaItem& item) {
  const GatedDeltaWorkspace at =
      gated_delta_workspace(item.key_dim, item.value_dim, item.num_heads);
  float* states = item.workspace + at.state;
  const int64_t state_size = (at.size - at.state) / item.num_heads;
  if (item.num_tokens == 1 && !item.is_value_key && item.value_dim % kWidth == 0) {
    // Decoding: no copy of the state.
    load_step_keys(item, at, 0);
    for (int64_t head = 0; head < item.num_heads; ++head) {
      const float* initial =
          item.initial_state ? item.initial_state + head * item.initial_head_stride : nullptr;
      float* written = item.final_state + head * item.final_head_stride;
      for (int64_t first = 0; first < item.value_dim; first += kStrip) {
        step_strip(item, at, head, 0, first, initial ? initial + first : nullptr,
                   item.initial_row_stride, written + first, item.final_row_stride);
      }
    }
    return;
  }
  for (int64_t head = 0; head < item.num_heads; ++head) {
    load_state(item, head, states + head * state_size);
  }
  float* k = item.workspace + at.k;
  float* q = item.workspace + at.q;
  for (int64_t begin = 0; begin < item.num_tokens; begin += kChunk) {
    const int64_t left = item.num_tokens - begin;
    const int64_t count = left < kChunk ? left : kChunk;
    if (count == 1) {
      load_step_keys(item, at, begin);
      for (int64_t head = 0; head < item.num_heads; ++head) {
        float* strip = states + head * state_size;
        for (int64_t first = 0; first < item.value_dim;
             first += kStrip, strip += item.key_dim * kStrip) {
          step_strip(item, at, head, begin, first, strip, kStrip, strip, kStrip);
        }
      }
      continue;
    }
    const int64_t padded_count = round_up(count, kBlockRows);
    float* k_transposed = item.workspace + at.k_transposed;
    load_keys(item, item.k, item.k_token_stride, begin, count, padded_count, 1.0f, k);
    transpose(k, item.key_dim, k_transposed, kChunk, padded_count, item.key_dim);
    for (int64_t d = 0; padded_count < kChunk && d < item.key_dim; ++d) {
      memset(k_transposed + d * kChunk + padded_count, 0,
             static_cast<size_t>(kChunk - padded_count) * sizeof(float));
    }
    multiply_keys(k, k_transposed, item.key_dim, padded_count, item.workspace + at.gram);
    if (item.q) {
      load_keys(item, item.q, item.q_token_stride, begin, count, padded_count, item.scale, q);
      multiply_keys(q, k_transposed, item.key_dim, padded_count, item.workspace + at.scores);
    }
    for (int64_t head = 0; head < item.num_heads; ++head) {
      run_chunk_head(item, at, head, begin, count, states + head * state_size);
    }
  }
  for (int64_t head = 0; head < item.num_heads; ++head) {
    store_state(item, head, states + head * state_size);
  }
}

}  // namespace
}  // namespace kvspan::cpu
