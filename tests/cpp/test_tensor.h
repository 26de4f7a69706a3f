// Tensors for tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "kvspan/tensor_view.h"

namespace kvspan::test {

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
