// kvspan._core: the gated delta rule and the convolution before it.
#include "kvspan/gated_delta.h"

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "kvspan/causal_conv1d.h"
#include "kvspan/tensor_view.h"
#include "kvspan/vector_isa.h"
#include "stream.h"
#include "tensor_caster.h"

namespace kvspan::bindings {
namespace {

// A tensor or None, of which the view has no data. A tensor without elements may have none either:
// its view points here.
class OptionalTensor {
 public:
  OptionalTensor(py::handle object, const char* name) {
    if (object.is_none()) return;
    tensor_.emplace(object, name);
    view_ = tensor_->view();
    if (!view_.data) view_.data = &no_elements_;
  }

  const TensorView& view() const { return view_; }

 private:
  std::optional<BorrowedTensor> tensor_;
  TensorView view_;
  char no_elements_ = 0;
};

// int64, or int32, which is copied.
class SequenceBounds {
 public:
  explicit SequenceBounds(py::handle object) : tensor_(object, "cu_seqlens") {
    const TensorView& view = tensor_.view();
    if (view.dtype != kInt32 || view.ndim != 1 || view.device.type != DeviceType::kCpu) {
      elements_ = int64_elements(view, "cu_seqlens");
      return;
    }
    for (std::int64_t i = 0; i < view.shape[0]; ++i) {
      copy_.push_back(view.as<const std::int32_t>()[i * view.strides[0]]);
    }
    elements_ = copy_;
  }

  std::span<const std::int64_t> elements() const { return elements_; }

 private:
  BorrowedTensor tensor_;
  std::vector<std::int64_t> copy_;
  std::span<const std::int64_t> elements_;
};

void gated_delta(py::handle q, py::handle k, py::handle v, py::handle g, py::handle beta,
                 py::handle initial_state, py::handle out, py::handle final_state,
                 py::handle cu_seqlens, std::string_view state_layout, bool qk_l2norm, float scale,
                 int num_threads, py::handle stream, std::string_view isa) {
  const OptionalTensor queries(q, "q"), outputs(out, "out"),
      initial(initial_state, "initial_state");
  const BorrowedTensor keys(k, "k"), values(v, "v"), decay(g, "g"), strength(beta, "beta");
  const BorrowedTensor last(final_state, "final_state");
  const SequenceBounds bounds(cu_seqlens);
  const GatedDeltaArgs args{.q = queries.view(),
                            .k = keys.view(),
                            .v = values.view(),
                            .g = decay.view(),
                            .beta = strength.view(),
                            .initial_state = initial.view(),
                            .out = outputs.view(),
                            .final_state = last.view(),
                            .cu_seqlens = bounds.elements(),
                            .state_layout = parse_state_layout(state_layout),
                            .qk_l2norm = qk_l2norm,
                            .scale = scale,
                            .num_threads = num_threads,
                            .isa = parse_vector_isa(isa),
                            .stream = stream_handle(stream, "stream")};
  const py::gil_scoped_release release;
  kvspan::gated_delta(args);
}

void causal_conv1d(py::handle x, py::handle weight, py::handle bias, py::handle state,
                   py::handle out, py::handle cu_seqlens, bool silu, int num_threads,
                   py::handle stream, std::string_view isa) {
  const BorrowedTensor input(x, "x"), weights(weight, "weight");
  const OptionalTensor biases(bias, "bias");
  const BorrowedTensor states(state, "state"), output(out, "out");
  const SequenceBounds bounds(cu_seqlens);
  const CausalConv1dArgs args{.x = input.view(),
                              .weight = weights.view(),
                              .bias = biases.view(),
                              .state = states.view(),
                              .out = output.view(),
                              .cu_seqlens = bounds.elements(),
                              .silu = silu,
                              .num_threads = num_threads,
                              .isa = parse_vector_isa(isa),
                              .stream = stream_handle(stream, "stream")};
  const py::gil_scoped_release release;
  kvspan::causal_conv1d(args);
}

}  // namespace

void bind_gated_delta(py::module_& m) {
  m.def("gated_delta", &gated_delta, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("g"),
        py::arg("beta"), py::arg("initial_state"), py::arg("out"), py::arg("final_state"),
        py::arg("cu_seqlens"), py::arg("state_layout"), py::arg("qk_l2norm"), py::arg("scale"),
        py::arg("num_threads"), py::arg("stream"), py::arg("isa"));
  m.def("causal_conv1d", &causal_conv1d, py::arg("x"), py::arg("weight"), py::arg("bias"),
        py::arg("state"), py::arg("out"), py::arg("cu_seqlens"), py::arg("silu"),
        py::arg("num_threads"), py::arg("stream"), py::arg("isa"));
}

}  // namespace kvspan::bindings
