// Turns a Python tensor into a kvspan::TensorView by DLPack, without copying data.
//
// torch >= 2.10 publishes a C table of functions on its tensor type (__dlpack_c_exchange_api__),
// through which a tensor is borrowed without making any Python object. Everything else (numpy,
// older torch) goes through __dlpack__(). No stream is synchronised either way: the caller passes
// the stream its tensors live on.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>

#include "dlpack_abi.h"
#include "kvspan/check.h"
#include "kvspan/tensor_view.h"

namespace kvspan::bindings {

namespace py = pybind11;

// A view of a Python tensor, valid while this object and the Python object live.
class BorrowedTensor {
 public:
  // name: the argument's name, for messages. Throws TypeError for an object that is no tensor.
  BorrowedTensor(py::handle object, const ArgName& name) {
    if (borrow(object, name)) return;
    if (!py::hasattr(object, "__dlpack__")) {
      throw TypeError(concat(name, ": expected a numpy array or a tensor with DLPack support, got ",
                             Py_TYPE(object.ptr())->tp_name));
    }
    import_capsule(object, name);
  }

  const TensorView& view() const { return view_; }

 private:
  struct CallDeleter {
    template <typename Managed>
    void operator()(Managed* managed) const {
      if (managed->deleter) managed->deleter(managed);
    }
  };

  // The type's exchange table, or null. Nearly all calls see one tensor type, so the last answer is
  // kept (with a reference to the type, so that its address stays its own).
  static const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
    static PyTypeObject* last_type = nullptr;
    static const dlpack::ExchangeApi* last_api = nullptr;
    if (type == last_type) return last_api;
    const dlpack::ExchangeApi* api = nullptr;
    if (PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type),
                                                   "__dlpack_c_exchange_api__")) {
      api = static_cast<const dlpack::ExchangeApi*>(
          PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
      Py_DECREF(capsule);
    }
    PyErr_Clear();
    while (api && api->version.major != dlpack::kMajorVersion) api = api->previous;
    if (api && !api->tensor_from_py_object) api = nullptr;
    Py_INCREF(type);
    Py_XDECREF(last_type);
    last_type = type;
    last_api = api;
    return api;
  }

  // The producer's own reason (object arrays, sparse and meta tensors, ...) as one line.
  [[noreturn]] static void refuse(const py::error_already_set& error, const ArgName& name) {
    const std::string reason = py::str(error.value());
    throw TypeError(concat(
        name, ": this tensor cannot be used by DLPack: ", reason.substr(0, reason.find('\n'))));
  }

  bool borrow(py::handle object, const ArgName& name) {
    const dlpack::ExchangeApi* api = exchange_api(Py_TYPE(object.ptr()));
    if (!api) return false;
    dlpack::Tensor tensor;
    if (api->tensor_from_py_object(object.ptr(), &tensor) != 0) {
      refuse(py::error_already_set(), name);
    }
    set_view(tensor, /*read_only=*/false, name);
    return true;
  }

  void import_capsule(py::handle object, const ArgName& name) {
    using py::literals::operator""_a;
    const py::object export_tensor = object.attr("__dlpack__");
    // -1 on CUDA: no synchronisation. Other devices take no stream.
    const auto [device_type, device_id] =
        object.attr("__dlpack_device__")().cast<std::pair<int, int>>();
    const py::object stream = device_type == dlpack::kCuda ? py::object(py::int_(-1)) : py::none();
    py::object capsule;
    try {
      capsule = export_tensor(
          "stream"_a = stream,
          "max_version"_a = py::make_tuple(dlpack::kMajorVersion, dlpack::kMinorVersion));
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) refuse(error, name);
      capsule = export_tensor("stream"_a = stream);  // a producer older than DLPack 1.0
    }
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
      versioned_.reset(static_cast<dlpack::ManagedTensorVersioned*>(
          PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned")));
      PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
      if (versioned_->version.major != dlpack::kMajorVersion) {
        // Beyond the deleter, the layout of another major version is unknown.
        throw TypeError(
            concat(name, ": expected a DLPack 1.x tensor, got DLPack ", versioned_->version.major));
      }
      set_view(versioned_->tensor, (versioned_->flags & dlpack::kFlagReadOnly) != 0, name);
    } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
      unversioned_.reset(
          static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor")));
      PyCapsule_SetName(capsule.ptr(), "used_dltensor");
      set_view(unversioned_->tensor, /*read_only=*/false, name);
    } else {
      throw TypeError(concat(name, ": __dlpack__() gave no DLPack capsule"));
    }
  }

  void set_view(const dlpack::Tensor& tensor, bool read_only, const ArgName& name) {
    KVSPAN_CHECK_ARG(tensor.ndim <= kMaxDims, name, ": expected at most ", kMaxDims,
                     " dimensions, got ", tensor.ndim);
    view_.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
    view_.dtype = to_dtype(tensor.dtype);
    view_.device = to_device(tensor.device);
    view_.ndim = tensor.ndim;
    view_.read_only = read_only;
    std::int64_t contiguous = 1;
    for (int i = tensor.ndim - 1; i >= 0; --i) {
      view_.shape[i] = tensor.shape[i];
      view_.strides[i] = tensor.strides ? tensor.strides[i] : contiguous;
      contiguous *= tensor.shape[i];
    }
  }

  static DType to_dtype(dlpack::DataType dtype) {
    if (dtype.lanes != 1) return {kvspan::TypeCode::kOther, 0};
    switch (dtype.code) {
      case dlpack::kInt:
        return {kvspan::TypeCode::kInt, dtype.bits};
      case dlpack::kUInt:
        return {kvspan::TypeCode::kUInt, dtype.bits};
      case dlpack::kFloat:
        return {kvspan::TypeCode::kFloat, dtype.bits};
      case dlpack::kBFloat:
        return {kvspan::TypeCode::kBFloat, dtype.bits};
      case dlpack::kBool:
        return {kvspan::TypeCode::kBool, dtype.bits};
      case dlpack::kFloat8E4M3FN:
        return {kvspan::TypeCode::kFloat8E4M3FN, dtype.bits};
      case dlpack::kFloat8E5M2:
        return {kvspan::TypeCode::kFloat8E5M2, dtype.bits};
      default:
        return {kvspan::TypeCode::kOther, dtype.bits};
    }
  }

  static Device to_device(dlpack::Device device) {
    switch (device.device_type) {
      case dlpack::kCpu:
      case dlpack::kCudaHost:
        return {DeviceType::kCpu, 0};
      case dlpack::kCuda:
      case dlpack::kCudaManaged:
        return {DeviceType::kCuda, device.device_id};
      default:
        return {DeviceType::kOther, device.device_id};
    }
  }

  TensorView view_;
  std::unique_ptr<dlpack::ManagedTensorVersioned, CallDeleter> versioned_;
  std::unique_ptr<dlpack::ManagedTensor, CallDeleter> unversioned_;
};

}  // namespace kvspan::bindings
