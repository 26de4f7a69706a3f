// The parts of kvspan._core that have a file of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace kvspan::bindings {

void bind_block_hash(pybind11::module_& m);
void bind_gated_delta(pybind11::module_& m);
void bind_copy_queue(pybind11::module_& m);
void bind_move_plan(pybind11::module_& m);

}  // namespace kvspan::bindings
