#include "kvspan/tensor_view.h"

#include "kvspan/check.h"

namespace kvspan {
namespace {

template <typename T>
std::span<const T> elements(const TensorView& tensor, DType dtype, const ArgName& name) {
  KVSPAN_CHECK(tensor.dtype == dtype, TypeError, name, ": expected ", to_string(dtype), ", got ",
               to_string(tensor.dtype));
  KVSPAN_CHECK_ARG(tensor.device.type == DeviceType::kCpu, name, ": expected a cpu tensor, got ",
                   to_string(tensor.device));
  KVSPAN_CHECK_ARG(tensor.ndim == 1, name, ": expected one dimension, got ",
                   shape_to_string(tensor));
  KVSPAN_CHECK_ARG(tensor.strides[0] == 1 || tensor.shape[0] <= 1, name,
                   ": expected contiguous elements, got stride ", tensor.strides[0]);
  return {tensor.as<const T>(), static_cast<std::size_t>(tensor.shape[0])};
}

}  // namespace

TensorView make_view(void* data, DType dtype, const std::vector<std::int64_t>& shape,
                     Device device) {
  KVSPAN_CHECK_ARG(shape.size() <= kMaxDims, "shape: expected at most ", kMaxDims,
                   " dimensions, got ", shape.size());
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.ndim = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.shape[i] = shape[i];
    view.strides[i] = stride;
    stride *= shape[i];
  }
  return view;
}

std::string to_string(DType dtype) {
  switch (dtype.code) {
    case TypeCode::kInt:
      return concat("int", int{dtype.bits});
    case TypeCode::kUInt:
      return concat("uint", int{dtype.bits});
    case TypeCode::kFloat:
      return concat("float", int{dtype.bits});
    case TypeCode::kBFloat:
      return concat("bfloat", int{dtype.bits});
    case TypeCode::kBool:
      return "bool";
    case TypeCode::kFloat8E4M3FN:
      return "float8_e4m3fn";
    case TypeCode::kFloat8E5M2:
      return "float8_e5m2";
    case TypeCode::kOther:
      return concat("a ", int{dtype.bits}, "-bit type");
  }
  return "an unknown type";
}

std::string to_string(Device device) {
  switch (device.type) {
    case DeviceType::kCpu:
      return "cpu";
    case DeviceType::kCuda:
      return concat("cuda:", device.index);
    case DeviceType::kOther:
      return "a device that is neither cpu nor cuda";
  }
  return "an unknown device";
}

std::string shape_to_string(const TensorView& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.ndim; ++i) text += concat(i ? ", " : "", tensor.shape[i]);
  return text + "]";
}

std::span<const std::int64_t> int64_elements(const TensorView& tensor, const ArgName& name) {
  return elements<std::int64_t>(tensor, kInt64, name);
}

std::span<const float> float32_elements(const TensorView& tensor, const ArgName& name) {
  return elements<float>(tensor, kFloat32, name);
}

Int64Rows int64_rows(const TensorView& tensor, const ArgName& name) {
  if (tensor.ndim != 2) return {int64_elements(tensor, name), 1};
  KVSPAN_CHECK_ARG(tensor.strides[0] == tensor.shape[1] || tensor.shape[0] <= 1, name,
                   ": expected contiguous rows, got stride ", tensor.strides[0]);
  TensorView flat = tensor;
  flat.ndim = 1;
  flat.shape[0] = tensor.shape[0] * tensor.shape[1];
  flat.strides[0] = tensor.strides[1];
  return {int64_elements(flat, name), tensor.shape[1]};
}

}  // namespace kvspan
