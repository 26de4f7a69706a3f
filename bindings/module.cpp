// kvspan._core: def lines and the exception map only. kvspan.ops documents the functions.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "kvspan/block_copy.h"
#include "kvspan/check.h"
#include "kvspan/device.h"
#include "kvspan/rerope.h"
#include "kvspan/sha256.h"
#include "kvspan/vector_isa.h"
#include "stream.h"
#include "tensor_caster.h"

namespace py = pybind11;
using kvspan::bindings::BorrowedTensor;
using kvspan::bindings::stream_handle;

namespace {

// The tensors of one argument, one a layer.
class BorrowedTensors {
 public:
  BorrowedTensors(const py::sequence& objects, const char* name) {
    const auto count = static_cast<std::int64_t>(objects.size());
    for (std::int64_t i = 0; i < count; ++i) {
      tensors_.push_back(
          std::make_unique<BorrowedTensor>(objects[i], kvspan::ArgName(name, count > 1 ? i : -1)));
    }
  }

  std::size_t size() const { return tensors_.size(); }
  const kvspan::TensorView& operator[](std::size_t i) const { return tensors_[i]->view(); }

 private:
  std::vector<std::unique_ptr<BorrowedTensor>> tensors_;
};

void rerope(const py::sequence& k_src, const py::sequence& k_dst, const py::sequence& v_src,
            const py::sequence& v_dst, py::handle src_blocks, py::handle dst_blocks,
            py::handle deltas, const py::sequence& inv_freq, const std::vector<bool>& is_neox,
            py::handle axes, std::int64_t rotary_offset, std::string_view layout, int num_threads,
            py::handle stream, std::string_view isa) {
  const BorrowedTensors keys_in(k_src, "k_src"), keys_out(k_dst, "k_dst");
  const BorrowedTensors values_in(v_src, "v_src"), values_out(v_dst, "v_dst");
  const BorrowedTensors frequencies(inv_freq, "inv_freq");
  const BorrowedTensor src(src_blocks, "src_blocks");
  const BorrowedTensor dst(dst_blocks, "dst_blocks");
  const BorrowedTensor delta(deltas, "deltas");
  const BorrowedTensor axis(axes, "axes");
  const std::size_t num_layers = keys_in.size();
  for (const auto& [size, name] :
       {std::pair{keys_out.size(), "k_dst"}, std::pair{frequencies.size(), "inv_freq"},
        std::pair{is_neox.size(), "is_neox"}}) {
    KVSPAN_CHECK_ARG(size == num_layers, name, ": expected one per layer, ", num_layers,
                     " like k_src, got ", size);
  }
  for (const auto& [size, name] :
       {std::pair{values_in.size(), "v_src"}, std::pair{values_out.size(), "v_dst"}}) {
    KVSPAN_CHECK_ARG(size == 0 || size == num_layers, name, ": expected none or one per layer, ",
                     num_layers, " like k_src, got ", size);
  }
  std::vector<kvspan::ReropeLayer> layers(num_layers);
  for (std::size_t i = 0; i < num_layers; ++i) {
    layers[i].k_src = keys_in[i];
    layers[i].k_dst = keys_out[i];
    if (values_in.size()) layers[i].v_src = values_in[i];
    if (values_out.size()) layers[i].v_dst = values_out[i];
    layers[i].inv_freq =
        float32_elements(frequencies[i], {"inv_freq", num_layers > 1 ? static_cast<int>(i) : -1});
    layers[i].is_neox = is_neox[i];
  }
  const auto [delta_elements, num_axes] = int64_rows(delta.view(), "deltas");
  const kvspan::ReropeArgs args{.layers = layers,
                                .layout = kvspan::parse_kv_layout(layout),
                                .src_blocks = int64_elements(src.view(), "src_blocks"),
                                .dst_blocks = int64_elements(dst.view(), "dst_blocks"),
                                .deltas = delta_elements,
                                .num_axes = static_cast<int>(num_axes),
                                .axes = int64_elements(axis.view(), "axes"),
                                .rotary_offset = rotary_offset,
                                .num_threads = num_threads,
                                .isa = kvspan::parse_vector_isa(isa),
                                .stream = stream_handle(stream, "stream")};
  const py::gil_scoped_release release;
  kvspan::rerope(args);
}

void copy_blocks(py::handle src, py::handle dst, py::handle src_blocks, py::handle dst_blocks,
                 int num_threads, py::handle stream) {
  const BorrowedTensor source(src, "src");
  const BorrowedTensor destination(dst, "dst");
  const BorrowedTensor from(src_blocks, "src_blocks");
  const BorrowedTensor to(dst_blocks, "dst_blocks");
  const kvspan::BlockCopyArgs args{.src = source.view(),
                                   .dst = destination.view(),
                                   .src_blocks = int64_elements(from.view(), "src_blocks"),
                                   .dst_blocks = int64_elements(to.view(), "dst_blocks"),
                                   .num_threads = num_threads,
                                   .stream = stream_handle(stream, "stream")};
  const py::gil_scoped_release release;
  kvspan::copy_blocks(args);
}

template <typename Isa>
py::tuple names_of(const std::vector<Isa>& isas) {
  py::tuple names(isas.size());
  for (std::size_t i = 0; i < isas.size(); ++i) names[i] = kvspan::to_string(isas[i]);
  return names;
}

}  // namespace

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

  kvspan::bindings::bind_block_hash(m);
  m.def("sha256_isas", [] { return names_of(kvspan::sha256_isas()); });
  m.def("vector_isas", [] { return names_of(kvspan::vector_isas()); });
  m.def("built_with_cuda", &kvspan::built_with_cuda);
  m.def("cuda_device_count", &kvspan::cuda_device_count);
  m.def(
      "stream_handle",
      [](py::handle stream) {
        return reinterpret_cast<std::uintptr_t>(stream_handle(stream, "stream"));
      },
      py::arg("stream"));

  kvspan::bindings::bind_copy_queue(m);
  kvspan::bindings::bind_move_plan(m);
  kvspan::bindings::bind_gated_delta(m);
  m.def("rerope", &rerope, py::arg("k_src"), py::arg("k_dst"), py::arg("v_src"), py::arg("v_dst"),
        py::arg("src_blocks"), py::arg("dst_blocks"), py::arg("deltas"), py::arg("inv_freq"),
        py::arg("is_neox"), py::arg("axes"), py::arg("rotary_offset"), py::arg("layout"),
        py::arg("num_threads"), py::arg("stream"), py::arg("isa"));
  m.def("copy_blocks", &copy_blocks, py::arg("src"), py::arg("dst"), py::arg("src_blocks"),
        py::arg("dst_blocks"), py::kw_only(), py::arg("num_threads") = 0, py::arg("stream") = 0);
}
