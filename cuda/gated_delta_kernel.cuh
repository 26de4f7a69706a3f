// The gated delta rule: one thread block takes one sequence, one value head and kColumns value
// dimensions, whose state stays in shared memory from the first chunk to the last. See
// kvspan/gated_delta.h for the equations.
#pragma once

#include <cmath>

#include "gated_delta_tiles.cuh"

namespace kvspan::cuda {

constexpr int kChunkTokens = 64;
constexpr int kColumns = 64;
constexpr int kSequencesPerLaunch = 384;
constexpr int kSquareStride = kChunkTokens + 4;  // of 64 columns, without bank conflicts

struct GatedDeltaKernelArgs {
  const void* q;  // null: only the state
  const void* k;
  const void* v;
  const float* g;
  const float* beta;
  const float* initial_state;  // null: zero
  void* out;
  float* final_state;
  std::int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride;
  std::int64_t v_token_stride, v_head_stride, out_token_stride, out_head_stride;
  std::int64_t g_token_stride, g_head_stride, beta_token_stride, beta_head_stride;
  std::int64_t initial_sequence_stride, initial_head_stride, initial_row_stride;
  std::int64_t final_sequence_stride, final_head_stride, final_row_stride;
  std::int32_t key_dim, value_dim;
  std::int32_t heads_per_key_head;
  std::int32_t first_sequence;  // of this launch
  bool is_value_key, l2norm;
  // Whether every row of the tensor starts on 16 bytes and has a multiple of them.
  bool wide_q, wide_k, wide_v, wide_initial, wide_final;
  float scale;
  std::int64_t cu_seqlens[kSequencesPerLaunch + 1];
};
static_assert(sizeof(GatedDeltaKernelArgs) <= 4096, "what kernel parameters may take everywhere");

__host__ __device__ inline int padded_key_dim(int key_dim) {
  return (key_dim + kTile - 1) / kTile * kTile;
}

// Floats of shared memory: the state, keys, updates, system and gates; queries and weights.
__host__ __device__ inline int gated_delta_shared_floats(int key_dim, bool has_queries) {
  const int padded = padded_key_dim(key_dim);
  const int state = padded * kSquareStride, keys = kChunkTokens * (padded + 4);
  const int square = kChunkTokens * kSquareStride;
  return state + keys + 2 * square + 8 * kChunkTokens + (has_queries ? keys + square : 0);
}

// rows x columns from global to shared memory; columns up to padded, and rows up to padded_rows,
// become 0.
template <typename T>
__device__ inline void load_matrix(const T* src, std::int64_t stride, bool wide, int rows,
                                   int columns, Matrix to, int padded_rows, int padded) {
  constexpr int kPack = kVectorBytes / static_cast<int>(sizeof(T));
  if (wide && columns % kPack == 0 && padded % kPack == 0) {
    const int per_row = padded / kPack;
    for (int item = static_cast<int>(threadIdx.x); item < padded_rows * per_row;
         item += static_cast<int>(blockDim.x)) {
      const int row = item / per_row, column = item % per_row * kPack;
      Pack<T, kPack, kVectorBytes> pack{};
      if (row < rows && column < columns) {
        pack = *reinterpret_cast<const Pack<T, kPack, kVectorBytes>*>(src + row * stride + column);
      }
      for (int i = 0; i < kPack; ++i) *from(to, row, column + i).data = to_float(pack.values[i]);
    }
    return;
  }
  for (int item = static_cast<int>(threadIdx.x); item < padded_rows * padded;
       item += static_cast<int>(blockDim.x)) {
    const int row = item / padded, column = item % padded;
    *from(to, row, column).data =
        row < rows && column < columns ? to_float(src[row * stride + column]) : 0.0f;
  }
}

// Each row times factor, and by 1 / sqrt(|x|^2 + eps) if so asked. sums: 4 * kChunkTokens floats.
__device__ inline void normalize_rows(Matrix x, int rows, int columns, bool l2norm, float factor,
                                      float* sums) {
  if (l2norm) {
    for (int item = static_cast<int>(threadIdx.x); item < 4 * rows;
         item += static_cast<int>(blockDim.x)) {
      float sum = 0.0f;
      for (int c = item % 4; c < columns; c += 4) {
        const float value = x.data[item / 4 * x.stride + c];
        sum = fmaf(value, value, sum);
      }
      sums[item] = sum;
    }
    __syncthreads();
  }
  for (int item = static_cast<int>(threadIdx.x); item < rows * columns;
       item += static_cast<int>(blockDim.x)) {
    const int row = item / columns;
    float by = factor;
    if (l2norm) {
      const float* s = sums + 4 * row;
      by /= sqrtf(s[0] + s[1] + s[2] + s[3] + 1e-6f);
    }
    x.data[row * x.stride + item % columns] *= by;
  }
  __syncthreads();
}

// Element (i, j) of a lower triangle by D_ij; of the system, by -beta_i too, and its diagonal
// becomes 0, as all elements above it do.
__device__ inline void apply_decay(Matrix square, int count, const float* alpha, const float* beta,
                                   bool is_system) {
  constexpr int kParts = kChunkTokens / kTile;
  for (int item = static_cast<int>(threadIdx.x); item < kParts * kChunkTokens;
       item += static_cast<int>(blockDim.x)) {
    const int column = item % kChunkTokens, first = item / kChunkTokens * kTile;
    float decay = 1.0f;
    for (int row = column + 1; row < first; ++row) decay *= alpha[row];
    for (int row = first; row < first + kTile; ++row) {
      if (row > column) decay *= alpha[row];
      float* at = square.data + row * square.stride + column;
      const bool kept = row < count && (is_system ? row > column : row >= column);
      *at = kept ? *at * decay * (is_system ? -beta[row] : 1.0f) : 0.0f;
    }
  }
  __syncthreads();
}

// x <- (I - system)^-1 x for 64 columns: tiles of rows by products, each tile's own corner by
// substitution, a thread a column.
template <bool kPrecise>
__device__ inline void solve_triangular(Matrix system, Matrix x, int rows) {
  for (int first = 0; first < rows; first += kTile) {
    if (first > 0) {
      multiply<kPrecise, false, false>(from(x, first, 0), from(system, first, 0), x, kTile,
                                       kColumns, first, true);
      __syncthreads();
    }
    for (int column = static_cast<int>(threadIdx.x); column < kColumns;
         column += static_cast<int>(blockDim.x)) {
      float solved[kTile];
      KVSPAN_UNROLL
      for (int i = 0; i < kTile; ++i) {
        float sum = x.data[(first + i) * x.stride + column];
        const float* row = system.data + (first + i) * system.stride + first;
        KVSPAN_UNROLL
        for (int j = 0; j < i; ++j) sum = fmaf(row[j], solved[j], sum);
        x.data[(first + i) * x.stride + column] = solved[i] = sum;
      }
    }
    __syncthreads();
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreadsPerBlock, 2)  // shared memory allows one or two
    gated_delta_kernel(const __grid_constant__ GatedDeltaKernelArgs args) {
#if defined(__CUDACC__)
  extern __shared__ __align__(32) float shared[];
#else
  alignas(32) static float shared[1 << 16];
#endif
  constexpr bool kPrecise = std::is_same_v<T, float>;  // 16-bit types are rounded more than that
  const int strips = (args.value_dim + kColumns - 1) / kColumns;
  const int head = static_cast<int>(blockIdx.x) / strips;
  const int first_column = static_cast<int>(blockIdx.x) % strips * kColumns;
  const int left = args.value_dim - first_column;
  const int columns = left < kColumns ? left : kColumns;
  const int key_head = head / args.heads_per_key_head;
  const int key_dim = args.key_dim, depth = padded_key_dim(key_dim);
  const std::int64_t sequence = args.first_sequence + std::int64_t{blockIdx.y};
  const std::int64_t end = args.cu_seqlens[blockIdx.y + 1];
  const bool has_queries = args.q != nullptr;

  const Matrix state{shared, kSquareStride};
  const Matrix keys{state.data + depth * kSquareStride, depth + 4};
  const Matrix updates{keys.data + kChunkTokens * keys.stride, kSquareStride};
  const Matrix system{updates.data + kChunkTokens * kSquareStride, kSquareStride};
  float* alpha = system.data + kChunkTokens * kSquareStride;
  float* beta = alpha + kChunkTokens;
  float* prefix = beta + kChunkTokens;
  float* to_end = prefix + kChunkTokens;
  float* sums = to_end + kChunkTokens;
  const Matrix queries{sums + 4 * kChunkTokens, keys.stride};
  const Matrix weights{queries.data + kChunkTokens * keys.stride, kSquareStride};

  const bool is_vk = args.is_value_key;
  const float* initial = args.initial_state;
  if (initial) {
    initial += sequence * args.initial_sequence_stride + head * args.initial_head_stride +
               (is_vk ? first_column * args.initial_row_stride : first_column);
  }
  const int have = initial ? 1 : 0;
  load_matrix(initial, args.initial_row_stride, args.wide_initial,
              have * (is_vk ? columns : key_dim), have * (is_vk ? key_dim : columns),
              is_vk ? transpose(state) : state, is_vk ? kColumns : depth, is_vk ? depth : kColumns);

  for (std::int64_t begin = args.cu_seqlens[blockIdx.y]; begin < end; begin += kChunkTokens) {
    const int count = end - begin < kChunkTokens ? static_cast<int>(end - begin) : kChunkTokens;
    const int rows = (count + kTile - 1) / kTile * kTile;
    __syncthreads();
    load_matrix(
        static_cast<const T*>(args.k) + begin * args.k_token_stride + key_head * args.k_head_stride,
        args.k_token_stride, args.wide_k, count, key_dim, keys, rows, depth);
    if (has_queries) {
      load_matrix(static_cast<const T*>(args.q) + begin * args.q_token_stride +
                      key_head * args.q_head_stride,
                  args.q_token_stride, args.wide_q, count, key_dim, queries, rows, depth);
    }
    for (int i = static_cast<int>(threadIdx.x); i < kChunkTokens;
         i += static_cast<int>(blockDim.x)) {
      const std::int64_t token = begin + i;
      alpha[i] =
          i < count ? expf(args.g[token * args.g_token_stride + head * args.g_head_stride]) : 1.0f;
      beta[i] = i < count ? args.beta[token * args.beta_token_stride + head * args.beta_head_stride]
                          : 0.0f;
    }
    __syncthreads();
    normalize_rows(keys, rows, depth, args.l2norm, 1.0f, sums);
    if (has_queries) normalize_rows(queries, rows, depth, args.l2norm, args.scale, sums);
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      float before = 1.0f, after = 1.0f;
      for (int j = 0; j <= i; ++j) before *= alpha[j];
      for (int j = i + 1; j < count; ++j) after *= alpha[j];
      prefix[i] = before;
      to_end[i] = after;
    }
    multiply<kPrecise, false, true, true>(system, keys, transpose(keys), rows, rows, depth, false);
    multiply<kPrecise, false, false>(updates, keys, state, rows, kColumns, depth, false);
    if (has_queries) {
      multiply<kPrecise, false, true, true>(weights, queries, transpose(keys), rows, rows, depth,
                                            false);
    }
    __syncthreads();
    apply_decay(system, count, alpha, beta, true);
    if (has_queries) apply_decay(weights, count, alpha, beta, false);
    const T* values = static_cast<const T*>(args.v) + begin * args.v_token_stride +
                      head * args.v_head_stride + first_column;
    constexpr int kPack = kVectorBytes / static_cast<int>(sizeof(T));
    const bool wide = args.wide_v && columns % kPack == 0;
    const int width = wide ? kPack : 1;
    for (int item = static_cast<int>(threadIdx.x); item < rows * (kColumns / width);
         item += static_cast<int>(blockDim.x)) {
      const int row = item / (kColumns / width), column = item % (kColumns / width) * width;
      const bool is_there = row < count && column < columns;
      Pack<T, kPack, kVectorBytes> pack{};
      const T* at = values + row * args.v_token_stride + column;
      if (is_there && wide) pack = *reinterpret_cast<const Pack<T, kPack, kVectorBytes>*>(at);
      if (is_there && !wide) pack.values[0] = *at;
      KVSPAN_UNROLL
      for (int i = 0; i < kPack; ++i) {
        if (i >= width) break;
        float* x = updates.data + row * updates.stride + column + i;
        *x = is_there ? beta[row] * (to_float(pack.values[i]) - prefix[row] * *x) : 0.0f;
      }
    }
    __syncthreads();
    solve_triangular<kPrecise>(system, updates, rows);
    if (has_queries) {
      // The system is no longer needed: outputs take its place.
      multiply<kPrecise, false, false>(system, queries, state, rows, kColumns, depth, false);
      __syncthreads();
      for (int item = static_cast<int>(threadIdx.x); item < count * kColumns;
           item += static_cast<int>(blockDim.x)) {
        system.data[item / kColumns * system.stride + item % kColumns] *= prefix[item / kColumns];
      }
      __syncthreads();
      multiply<kPrecise, false, false>(system, weights, updates, rows, kColumns, rows, true);
      __syncthreads();
      T* out = static_cast<T*>(args.out) + begin * args.out_token_stride +
               head * args.out_head_stride + first_column;
      for (int item = static_cast<int>(threadIdx.x); item < count * columns;
           item += static_cast<int>(blockDim.x)) {
        const int row = item / columns, column = item % columns;
        out[row * args.out_token_stride + column] =
            from_float<T>(system.data[row * system.stride + column]);
      }
    }
    for (int item = static_cast<int>(threadIdx.x); item < count * kColumns;
         item += static_cast<int>(blockDim.x)) {
      updates.data[item / kColumns * updates.stride + item % kColumns] *= to_end[item / kColumns];
    }
    const float decay = prefix[count - 1];
    for (int item = static_cast<int>(threadIdx.x); item < depth * kColumns;
         item += static_cast<int>(blockDim.x)) {
      state.data[item / kColumns * state.stride + item % kColumns] *= decay;
    }
    __syncthreads();
    multiply<kPrecise, true, false>(state, transpose(keys), updates, depth, kColumns, rows, true);
  }
  __syncthreads();

  float* final = args.final_state + sequence * args.final_sequence_stride +
                 head * args.final_head_stride +
                 (is_vk ? first_column * args.final_row_stride : first_column);
  const Matrix rows = is_vk ? transpose(state) : state;
  const int num_rows = is_vk ? columns : key_dim, row_size = is_vk ? key_dim : columns;
  const int width = args.wide_final && row_size % 4 == 0 ? 4 : 1;
  for (int item = static_cast<int>(threadIdx.x); item < num_rows * (row_size / width);
       item += static_cast<int>(blockDim.x)) {
    const int row = item / (row_size / width), column = item % (row_size / width) * width;
    float* to = final + row * args.final_row_stride + column;
    if (width == 1) {
      *to = *from(rows, row, column).data;
      continue;
    }
    Pack<float, 4, kVectorBytes> pack;
    for (int i = 0; i < 4; ++i) pack.values[i] = *from(rows, row, column + i).data;
    *reinterpret_cast<Pack<float, 4, kVectorBytes>*>(to) = pack;
  }
}

}  // namespace kvspan::cuda
