// The door of the gated delta rule: validates once, then runs on the tensors' device.
#include "kvspan/gated_delta.h"

#include <cmath>

#include "gated_delta_checks.h"
#include "kvspan/check.h"
#include "kvspan/device.h"

namespace kvspan {
namespace {

void check_inputs(const GatedDeltaArgs& args) {
  const TensorView &k = args.k, &v = args.v;
  KVSPAN_CHECK_ARG(v.ndim == 3, "v: expected shape [num_tokens, num_value_heads, value_dim], got ",
                   shape_to_string(v));
  KVSPAN_CHECK_ARG(k.ndim == 3 && k.shape[0] == v.shape[0], "k: expected shape [", v.shape[0],
                   ", num_key_heads, key_dim] (the tokens of v), got ", shape_to_string(k));
  KVSPAN_CHECK_ARG(k.shape[1] > 0 && v.shape[1] > 0 && k.shape[2] > 0 && v.shape[2] > 0,
                   "k, v: expected at least one head and dimension, got ", shape_to_string(k),
                   " and ", shape_to_string(v));
  KVSPAN_CHECK_ARG(v.shape[1] % k.shape[1] == 0, "v: expected a multiple of k's ", k.shape[1],
                   " heads, got ", v.shape[1]);
  check_storage_type(v, "v");
  check_type_like(k, "k", v.dtype, " like v");
  KVSPAN_CHECK_ARG(v.device.type != DeviceType::kOther,
                   "v: expected a cpu or cuda tensor, got one on ", to_string(v.device));
  check_device_like(k, "k", v.device, "v");
  check_last_contiguous(k, "k");
  check_last_contiguous(v, "v");
  for (const auto& [tensor, name] : {std::pair{&args.g, "g"}, std::pair{&args.beta, "beta"}}) {
    check_shape(*tensor, name, {v.shape[0], v.shape[1]}, "tokens and value heads of v");
    check_type_like(*tensor, name, kFloat32, "");
    check_device_like(*tensor, name, v.device, "v");
  }
  if (!args.q.data) return;
  check_shape(args.q, "q", {k.shape[0], k.shape[1], k.shape[2]}, "like k");
  check_type_like(args.q, "q", v.dtype, " like v");
  check_device_like(args.q, "q", v.device, "v");
  check_last_contiguous(args.q, "q");
  check_shape(args.out, "out", {v.shape[0], v.shape[1], v.shape[2]}, "like v");
  check_type_like(args.out, "out", v.dtype, " like v");
  check_device_like(args.out, "out", v.device, "v");
  check_last_contiguous(args.out, "out");
  check_written(args.out, "out");
  KVSPAN_CHECK_ARG(std::isfinite(args.scale), "scale: expected a finite number, got ", args.scale);
}

void check_state(const GatedDeltaArgs& args, const TensorView& state, const char* name) {
  const bool is_kv = args.state_layout == StateLayout::kKeyValue;
  const auto num_sequences = static_cast<std::int64_t>(args.cu_seqlens.size()) - 1;
  const std::int64_t key_dim = args.k.shape[2], value_dim = args.v.shape[2];
  check_shape(
      state, name,
      {num_sequences, args.v.shape[1], is_kv ? key_dim : value_dim, is_kv ? value_dim : key_dim},
      is_kv ? "sequences, value heads, key_dim, value_dim in layout kv"
            : "sequences, value heads, value_dim, key_dim in layout vk");
  check_type_like(state, name, kFloat32, "");
  check_device_like(state, name, args.v.device, "v");
  check_last_contiguous(state, name);
}

}  // namespace

StateLayout parse_state_layout(std::string_view name) {
  if (name == "kv") return StateLayout::kKeyValue;
  if (name == "vk") return StateLayout::kValueKey;
  throw ArgumentError(concat("state_layout: expected kv or vk, got '", name, "'"));
}

void gated_delta(const GatedDeltaArgs& args) {
  check_inputs(args);
  check_cu_seqlens(args.cu_seqlens, args.v.shape[0]);
  if (args.initial_state.data) check_state(args, args.initial_state, "initial_state");
  check_state(args, args.final_state, "final_state");
  check_written(args.final_state, "final_state");
  check_threads(args.num_threads);
  GatedDeltaArgs resolved = args;
  resolved.isa = resolve_vector_isa(args.isa);
  const bool on_cuda = args.v.device.type == DeviceType::kCuda;
  if (on_cuda) {
    KVSPAN_CHECK_ARG(args.k.shape[2] <= cuda::kMaxKeyDim, "k: expected a key_dim of at most ",
                     cuda::kMaxKeyDim, " on cuda, got ", args.k.shape[2]);
    require_cuda();
  }
  if (!has_elements(args.final_state)) return;
  on_cuda ? cuda::gated_delta(resolved) : cpu::gated_delta(resolved);
}

}  // namespace kvspan
