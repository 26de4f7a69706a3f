// The CUDA stream an argument names: a cudaStream_t as an integer, or an object of the CUDA stream
// protocol (torch.cuda.Stream, cuda.core.Stream, ...), whose __cuda_stream__() gives (0, handle).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "kvspan/check.h"

namespace kvspan::bindings {

inline void* stream_handle(pybind11::handle stream, const char* name) {
  namespace py = pybind11;
  py::object handle = py::reinterpret_borrow<py::object>(stream);
  if (py::hasattr(stream, "__cuda_stream__")) {
    const py::object told = stream.attr("__cuda_stream__")();
    if (!py::isinstance<py::tuple>(told) || py::len(told) != 2 ||
        !py::int_(0).equal(py::tuple(told)[0])) {
      throw TypeError(concat(name, ": __cuda_stream__() of ", Py_TYPE(stream.ptr())->tp_name,
                             ": expected (0, handle), got ", std::string(py::repr(told))));
    }
    handle = py::tuple(told)[1];
  }
  if (!PyLong_Check(handle.ptr())) {
    throw TypeError(concat(name, ": expected a cudaStream_t as an int, or an object with ",
                           "__cuda_stream__, got ", Py_TYPE(handle.ptr())->tp_name));
  }
  void* const address = PyLong_AsVoidPtr(handle.ptr());
  if (PyErr_Occurred()) {
    PyErr_Clear();
    throw ArgumentError(
        concat(name, ": expected a cudaStream_t, got ", std::string(py::str(handle))));
  }
  return address;
}

}  // namespace kvspan::bindings
