// Tensors for tests: a flat buffer and a view of it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "kvspan/tensor_view.h"

namespace kvspan::test {

// The view of a contiguous tensor.
inline TensorView make_view(void* data, DType dtype, const std::vector<std::int64_t>& shape) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.ndim = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.shape[i] = shape[i];
    view.strides[i] = stride;
    stride *= shape[i];
  }
  return view;
}

// The view with two dimensions exchanged: NHD of an HND pool.
inline TensorView transpose(TensorView view, int a, int b) {
  std::swap(view.shape[a], view.shape[b]);
  std::swap(view.strides[a], view.strides[b]);
  return view;
}

// Bytes with a pattern in which neighbours and blocks differ.
inline std::vector<std::uint8_t> make_bytes(std::size_t size, std::uint32_t seed) {
  std::vector<std::uint8_t> bytes(size);
  std::uint32_t x = seed * 2654435761u + 1;
  for (auto& byte : bytes) {
    x = x * 1664525u + 1013904223u;
    byte = static_cast<std::uint8_t>(x >> 24);
  }
  return bytes;
}

}  // namespace kvspan::test
