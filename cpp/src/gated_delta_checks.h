// Checks that the gated delta rule and the convolution before it share.
#pragma once

#include <initializer_list>
#include <span>

#include "kvspan/check.h"
#include "kvspan/tensor_view.h"

namespace kvspan {

inline bool has_shape(const TensorView& tensor, std::initializer_list<std::int64_t> shape) {
  if (tensor.ndim != static_cast<int>(shape.size())) return false;
  int dim = 0;
  for (const std::int64_t size : shape) {
    if (tensor.shape[dim++] != size) return false;
  }
  return true;
}

inline void check_shape(const TensorView& tensor, const char* name,
                        std::initializer_list<std::int64_t> shape, const char* meaning) {
  TensorView expected;
  for (const std::int64_t size : shape) expected.shape[expected.ndim++] = size;
  KVSPAN_CHECK_ARG(has_shape(tensor, shape), name, ": expected shape ", shape_to_string(expected),
                   " (", meaning, "), got ", shape_to_string(tensor));
}

inline void check_type_like(const TensorView& tensor, const char* name, DType dtype,
                            const char* like) {
  KVSPAN_CHECK(tensor.dtype == dtype, TypeError, name, ": expected ", to_string(dtype), like,
               ", got ", to_string(tensor.dtype));
}

inline void check_storage_type(const TensorView& tensor, const char* name) {
  KVSPAN_CHECK(tensor.dtype == kFloat32 || tensor.dtype == kBFloat16 || tensor.dtype == kFloat16,
               TypeError, name, ": expected float32, bfloat16 or float16, got ",
               to_string(tensor.dtype));
}

inline void check_device_like(const TensorView& tensor, const char* name, Device device,
                              const char* like) {
  KVSPAN_CHECK_ARG(tensor.device == device, name, ": expected a tensor on ", to_string(device),
                   " like ", like, ", got ", to_string(tensor.device));
}

inline void check_last_contiguous(const TensorView& tensor, const char* name) {
  const int last = tensor.ndim - 1;
  KVSPAN_CHECK_ARG(tensor.strides[last] == 1 || tensor.shape[last] <= 1, name,
                   ": expected a contiguous last dimension (stride 1), got stride ",
                   tensor.strides[last]);
}

inline void check_written(const TensorView& tensor, const char* name) {
  KVSPAN_CHECK_ARG(!tensor.read_only, name, ": expected a writable tensor, got a read-only one");
  for (int i = 0; i < tensor.ndim; ++i) {
    KVSPAN_CHECK_ARG(tensor.strides[i] != 0 || tensor.shape[i] <= 1, name,
                     ": expected distinct elements, got a dimension expanded from size 1 to ",
                     tensor.shape[i]);
  }
}

inline bool has_elements(const TensorView& tensor) {
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 0) return false;
  }
  return true;
}

// From 0 up to num_tokens, never down.
inline void check_cu_seqlens(std::span<const std::int64_t> cu_seqlens, std::int64_t num_tokens) {
  KVSPAN_CHECK_ARG(!cu_seqlens.empty(), "cu_seqlens: expected [num_sequences + 1], got [0]");
  KVSPAN_CHECK_ARG(cu_seqlens.front() == 0, "cu_seqlens[0]: expected 0, got ", cu_seqlens.front());
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i) {
    KVSPAN_CHECK_ARG(cu_seqlens[i] >= cu_seqlens[i - 1], "cu_seqlens[", i, "]: expected at least ",
                     cu_seqlens[i - 1], " like the one before, got ", cu_seqlens[i]);
  }
  KVSPAN_CHECK_ARG(cu_seqlens.back() == num_tokens, "cu_seqlens[", cu_seqlens.size() - 1,
                   "]: expected the ", num_tokens, " tokens there are, got ", cu_seqlens.back());
}

inline void check_threads(int num_threads) {
  KVSPAN_CHECK_ARG(num_threads >= 0, "num_threads: expected 0 (automatic) or more, got ",
                   num_threads);
}

}  // namespace kvspan
