// kvspan._core.plan_moves and its result, whose arrays are views, not copies.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "bindings.h"
#include "kvspan/block_moves.h"
#include "tensor_caster.h"

namespace kvspan::bindings {
namespace {

// A read-only array of the vector's elements that keeps the plan alive.
template <typename Element, typename T>
py::array view(const py::object& plan, const LargeVector<T>& elements) {
  static_assert(sizeof(Element) == sizeof(T));
  py::array_t<Element> array(static_cast<py::ssize_t>(elements.size()),
                             reinterpret_cast<const Element*>(elements.data()), plan);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

// A property that is a view of a member.
template <typename Element, auto Member>
py::array member_view(const py::object& plan) {
  return view<Element>(plan, plan.cast<const MovePlan&>().*Member);
}

MovePlan plan_moves(py::handle src_blocks, py::handle dst_blocks, py::handle deltas,
                    py::handle ref_counts, py::handle generations, py::handle free_blocks,
                    py::handle scratch_blocks, std::int64_t host_blocks, std::int64_t num_layers,
                    std::int64_t launch_budget, std::int64_t max_depth,
                    std::int64_t max_generations) {
  const BorrowedTensor src(src_blocks, "src_blocks");
  const BorrowedTensor dst(dst_blocks, "dst_blocks");
  const BorrowedTensor delta(deltas, "deltas");
  const BorrowedTensor refs(ref_counts, "ref_counts");
  const BorrowedTensor rotations(generations, "generations");
  const BorrowedTensor free(free_blocks, "free_blocks");
  const BorrowedTensor scratch(scratch_blocks, "scratch_blocks");
  const PlanMovesArgs args{.src_blocks = int64_elements(src.view(), "src_blocks"),
                           .dst_blocks = int64_elements(dst.view(), "dst_blocks"),
                           .deltas = int64_elements(delta.view(), "deltas"),
                           .ref_counts = int64_elements(refs.view(), "ref_counts"),
                           .generations = int64_elements(rotations.view(), "generations"),
                           .free_blocks = int64_elements(free.view(), "free_blocks"),
                           .scratch_blocks = int64_elements(scratch.view(), "scratch_blocks"),
                           .host_blocks = host_blocks,
                           .num_layers = num_layers,
                           .launch_budget = launch_budget,
                           .max_depth = max_depth,
                           .max_generations = max_generations};
  const py::gil_scoped_release release;
  return kvspan::plan_moves(args);
}

}  // namespace

void bind_move_plan(py::module_& m) {
  py::class_<MoveStats>(m, "MoveStats")
      .def_readonly("num_copies", &MoveStats::num_copies)
      .def_readonly("num_in_place", &MoveStats::num_in_place)
      .def_readonly("num_duplicates", &MoveStats::num_duplicates)
      .def_readonly("num_saved", &MoveStats::num_saved)
      .def_readonly("num_staged", &MoveStats::num_staged)
      .def_readonly("num_cycles", &MoveStats::num_cycles)
      .def_readonly("largest_cycle", &MoveStats::largest_cycle)
      .def_readonly("scratch_used", &MoveStats::scratch_used)
      .def_readonly("host_used", &MoveStats::host_used)
      .def_readonly("num_launches", &MoveStats::num_launches);

  using Int64 = std::int64_t;
  py::class_<MovePlan>(m, "MovePlan")
      .def_property_readonly("kinds", &member_view<std::uint8_t, &MovePlan::kinds>)
      .def_property_readonly("src_blocks", &member_view<Int64, &MovePlan::src_blocks>)
      .def_property_readonly("dst_blocks", &member_view<Int64, &MovePlan::dst_blocks>)
      .def_property_readonly("deltas", &member_view<Int64, &MovePlan::deltas>)
      .def_property_readonly("moves", &member_view<Int64, &MovePlan::moves>)
      .def_property_readonly("batch_offsets", &member_view<Int64, &MovePlan::batch_offsets>)
      .def_property_readonly("fused", &member_view<bool, &MovePlan::fused>)
      .def_property_readonly("destinations", &member_view<Int64, &MovePlan::destinations>)
      .def_property_readonly("generations", &member_view<Int64, &MovePlan::generations>)
      .def_property_readonly("stats", [](const MovePlan& plan) { return plan.stats; });

  m.attr("UNLIMITED") = kUnlimited;
  m.def("plan_moves", &plan_moves, py::arg("src_blocks"), py::arg("dst_blocks"), py::arg("deltas"),
        py::kw_only(), py::arg("ref_counts"), py::arg("generations"), py::arg("free_blocks"),
        py::arg("scratch_blocks"), py::arg("host_blocks"), py::arg("num_layers"),
        py::arg("launch_budget"), py::arg("max_depth"), py::arg("max_generations"));
}

}  // namespace kvspan::bindings
