// kvspan._core: def lines and the exception map only.
#include <pybind11/pybind11.h>

#include "kvspan/check.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, m) {
  m.doc() = "C++/CUDA core of kvspan; use kvspan.ops.";
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const kvspan::ArgumentError& e) {
      py::set_error(PyExc_ValueError, e.what());
    } catch (const kvspan::TypeError& e) {
      py::set_error(PyExc_TypeError, e.what());
    }
  });
}
