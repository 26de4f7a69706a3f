// Products of matrices in shared memory, by the tensor cores; on the host (host_shim.h) by loops.
// The tensor cores take factors as tf32, of 10 bits of mantissa. A precise product adds those of
// what these leave of the factors: 21 bits, and three times the work.
#pragma once

#include "common.cuh"

#if defined(__CUDACC__)
#include <mma.h>
#endif

namespace kvspan::cuda {

constexpr int kTile = 16;  // sides of matrices are multiples of it

// A matrix whose rows are stride floats apart; transposed: element (i, j) is at j * stride + i. On
// the device, tiles start on 32 bytes, so the stride is a multiple of 4 and 8 rows one of 8.
struct Matrix {
  float* data;
  int stride;
  bool transposed = false;
};

__host__ __device__ inline Matrix transpose(Matrix m) { return {m.data, m.stride, !m.transposed}; }

// The matrix without its first rows and columns.
__host__ __device__ inline Matrix from(Matrix m, int row, int column) {
  const int offset = m.transposed ? column * m.stride + row : row * m.stride + column;
  return {m.data + offset, m.stride, m.transposed};
}

#if defined(__CUDA_ARCH__)

// Rounds to tf32, and gives what is left of it.
template <typename FragmentT>
__device__ inline FragmentT round_to_tf32(FragmentT& fragment) {
  FragmentT rest;
#pragma unroll
  for (int i = 0; i < fragment.num_elements; ++i) {
    const float x = fragment.x[i];
    fragment.x[i] = nvcuda::wmma::__float_to_tf32(x);
    rest.x[i] = nvcuda::wmma::__float_to_tf32(x - fragment.x[i]);
  }
  return rest;
}

template <bool kPrecise, typename LayoutA, typename LayoutB>
__device__ inline void multiply_tile(float* c, int c_stride, Matrix a, Matrix b, int depth,
                                     bool accumulate) {
  using namespace nvcuda;
  wmma::fragment<wmma::accumulator, 16, 16, 8, float> sum;
  if (accumulate) {
    wmma::load_matrix_sync(sum, c, c_stride, wmma::mem_row_major);
  } else {
    wmma::fill_fragment(sum, 0.0f);
  }
  for (int t = 0; t < depth; t += 8) {
    wmma::fragment<wmma::matrix_a, 16, 16, 8, wmma::precision::tf32, LayoutA> left;
    wmma::fragment<wmma::matrix_b, 16, 16, 8, wmma::precision::tf32, LayoutB> right;
    wmma::load_matrix_sync(left, from(a, 0, t).data, a.stride);
    wmma::load_matrix_sync(right, from(b, t, 0).data, b.stride);
    const auto left_rest = round_to_tf32(left);
    const auto right_rest = round_to_tf32(right);
    if constexpr (kPrecise) {
      wmma::mma_sync(sum, left_rest, right, sum);
      wmma::mma_sync(sum, left, right_rest, sum);
    }
    wmma::mma_sync(sum, left, right, sum);
  }
  wmma::store_matrix_sync(c, sum, c_stride, wmma::mem_row_major);
}

#endif

// c = a b, or c += a b, of rows x depth by depth x columns, by the whole thread block; c is not
// transposed. kLower: tiles above the diagonal are left alone. The caller synchronises.
template <bool kPrecise, bool kTransposedA, bool kTransposedB, bool kLower = false>
__device__ inline void multiply(Matrix c, Matrix a, Matrix b, int rows, int columns, int depth,
                                bool accumulate) {
#if defined(__CUDA_ARCH__)
  using namespace nvcuda::wmma;
  using LayoutA = std::conditional_t<kTransposedA, col_major, row_major>;
  using LayoutB = std::conditional_t<kTransposedB, col_major, row_major>;
  const int column_tiles = columns / kTile;
  const int num_tiles = rows / kTile * column_tiles;
  for (int tile = threadIdx.x / 32; tile < num_tiles; tile += blockDim.x / 32) {
    const int row = tile / column_tiles * kTile, column = tile % column_tiles * kTile;
    if (kLower && column > row) continue;
    multiply_tile<kPrecise, LayoutA, LayoutB>(from(c, row, column).data, c.stride, from(a, row, 0),
                                              from(b, 0, column), depth, accumulate);
  }
#else
  for (int item = static_cast<int>(threadIdx.x); item < rows * columns;
       item += static_cast<int>(blockDim.x)) {
    const int row = item / columns, column = item % columns;
    if (kLower && column / kTile > row / kTile) continue;
    float* to = from(c, row, column).data;
    float sum = accumulate ? *to : 0.0f;
    for (int t = 0; t < depth; ++t) sum += *from(a, row, t).data * *from(b, t, column).data;
    *to = sum;
  }
#endif
}

}  // namespace kvspan::cuda
