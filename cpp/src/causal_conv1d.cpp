// The door of the causal convolution: validates once, then runs on the tensors' device.
#include "kvspan/causal_conv1d.h"

#include "gated_delta_checks.h"
#include "kvspan/check.h"
#include "kvspan/device.h"

namespace kvspan {

void causal_conv1d(const CausalConv1dArgs& args) {
  const TensorView &x = args.x, &weight = args.weight;
  KVSPAN_CHECK_ARG(x.ndim == 2, "x: expected shape [num_tokens, num_channels], got ",
                   shape_to_string(x));
  check_storage_type(x, "x");
  KVSPAN_CHECK_ARG(x.device.type != DeviceType::kOther,
                   "x: expected a cpu or cuda tensor, got one on ", to_string(x.device));
  check_last_contiguous(x, "x");
  KVSPAN_CHECK_ARG(weight.ndim == 2 && weight.shape[0] == x.shape[1], "weight: expected shape [",
                   x.shape[1], ", width] (the channels of x), got ", shape_to_string(weight));
  const std::int64_t width = weight.shape[1];
  KVSPAN_CHECK_ARG(width >= 1 && width <= kMaxConvWidth, "weight: expected a width of 1 to ",
                   kMaxConvWidth, ", got ", width);
  check_cu_seqlens(args.cu_seqlens, x.shape[0]);
  const auto num_sequences = static_cast<std::int64_t>(args.cu_seqlens.size()) - 1;
  check_shape(args.state, "state", {num_sequences, x.shape[1], width - 1},
              "sequences, channels, width - 1");
  check_shape(args.out, "out", {x.shape[0], x.shape[1]}, "like x");
  check_last_contiguous(args.out, "out");
  if (args.bias.data) check_shape(args.bias, "bias", {x.shape[1]}, "the channels of x");
  for (const auto& [tensor, name] : {std::pair{&weight, "weight"}, std::pair{&args.state, "state"},
                                     std::pair{&args.out, "out"}, std::pair{&args.bias, "bias"}}) {
    if (tensor == &args.bias && !args.bias.data) continue;
    check_type_like(*tensor, name, x.dtype, " like x");
    check_device_like(*tensor, name, x.device, "x");
  }
  check_written(args.state, "state");
  check_written(args.out, "out");
  check_threads(args.num_threads);
  CausalConv1dArgs resolved = args;
  resolved.isa = resolve_vector_isa(args.isa);
  const bool on_cuda = x.device.type == DeviceType::kCuda;
  if (on_cuda) require_cuda();
  if (!has_elements(x)) return;
  on_cuda ? cuda::causal_conv1d(resolved) : cpu::causal_conv1d(resolved);
}

}  // namespace kvspan
