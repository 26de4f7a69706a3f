// A tensor that somebody else owns: pointer, dtype, device, shape and strides.
//
// The core takes every tensor in this form. Strides and shapes count elements; names of byte sizes
// end in _bytes. Copying a view is cheap (no allocation) and copies no data.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvspan/check.h"

namespace kvspan {

enum class TypeCode : std::uint8_t {
  kInt,
  kUInt,
  kFloat,
  kBFloat,
  kBool,
  kFloat8E4M3FN,  // no infinity, largest number 448
  kFloat8E5M2,
  kOther
};

struct DType {
  TypeCode code = TypeCode::kOther;
  std::uint8_t bits = 0;

  constexpr std::int64_t size_bytes() const { return bits / 8; }
  constexpr bool operator==(const DType&) const = default;
};

inline constexpr DType kFloat32{TypeCode::kFloat, 32};
inline constexpr DType kFloat16{TypeCode::kFloat, 16};
inline constexpr DType kBFloat16{TypeCode::kBFloat, 16};
inline constexpr DType kFloat8E4M3FN{TypeCode::kFloat8E4M3FN, 8};
inline constexpr DType kFloat8E5M2{TypeCode::kFloat8E5M2, 8};
inline constexpr DType kInt32{TypeCode::kInt, 32};
inline constexpr DType kInt64{TypeCode::kInt, 64};

enum class DeviceType : std::uint8_t { kCpu, kCuda, kOther };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;

  constexpr bool operator==(const Device&) const = default;
};

inline constexpr int kMaxDims = 8;

struct TensorView {
  void* data = nullptr;
  DType dtype;
  Device device;
  int ndim = 0;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> strides{};  // in elements
  bool read_only = false;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// The view of a contiguous tensor of at most kMaxDims dimensions. Throws ArgumentError.
TensorView make_view(void* data, DType dtype, const std::vector<std::int64_t>& shape,
                     Device device = {});

// "float32", "bfloat16", "int64", ...
std::string to_string(DType dtype);
// "cpu", "cuda:0", ...
std::string to_string(Device device);
// "[2, 16, 8, 128]"
std::string shape_to_string(const TensorView& tensor);

// The elements of a contiguous cpu tensor of one dimension, int64 or float32; name is the
// argument's, for messages. Throws ArgumentError, TypeError.
std::span<const std::int64_t> int64_elements(const TensorView& tensor, const ArgName& name);
std::span<const float> float32_elements(const TensorView& tensor, const ArgName& name);

// The same for int64 of one dimension, [rows], or two, [rows, columns].
struct Int64Rows {
  std::span<const std::int64_t> elements;
  std::int64_t num_columns;
};
Int64Rows int64_rows(const TensorView& tensor, const ArgName& name);

}  // namespace kvspan
