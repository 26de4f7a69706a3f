// How the gated delta kernel is launched: once for all heads and, kSequencesPerLaunch at a time,
// sequences.
#pragma once

#include <algorithm>

#include "gated_delta_kernel.cuh"
#include "kvspan/check.h"
#include "kvspan/gated_delta.h"

namespace kvspan::cuda {

static_assert(kChunkTokens == kGatedDeltaChunk);

// Whether every row of dimension 0 and 1 (and 2, of a state) starts on 16 bytes and has a multiple
// of them.
inline bool has_wide_rows(const TensorView& tensor) {
  const std::int64_t size = tensor.dtype.size_bytes();
  std::int64_t all = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.data)) |
                     tensor.shape[tensor.ndim - 1] * size;
  for (int i = 0; i < tensor.ndim - 1; ++i) all |= tensor.strides[i] * size;
  return all % kVectorBytes == 0;
}

inline GatedDeltaKernelArgs make_gated_delta_args(const GatedDeltaArgs& args) {
  GatedDeltaKernelArgs to{};
  if (args.q.data) {
    to.q = args.q.data;
    to.q_token_stride = args.q.strides[0];
    to.q_head_stride = args.q.strides[1];
    to.wide_q = has_wide_rows(args.q);
    to.out = args.out.data;
    to.out_token_stride = args.out.strides[0];
    to.out_head_stride = args.out.strides[1];
  }
  to.k = args.k.data;
  to.k_token_stride = args.k.strides[0];
  to.k_head_stride = args.k.strides[1];
  to.wide_k = has_wide_rows(args.k);
  to.v = args.v.data;
  to.v_token_stride = args.v.strides[0];
  to.v_head_stride = args.v.strides[1];
  to.wide_v = has_wide_rows(args.v);
  to.g = args.g.as<const float>();
  to.g_token_stride = args.g.strides[0];
  to.g_head_stride = args.g.strides[1];
  to.beta = args.beta.as<const float>();
  to.beta_token_stride = args.beta.strides[0];
  to.beta_head_stride = args.beta.strides[1];
  if (args.initial_state.data) {
    to.initial_state = args.initial_state.as<const float>();
    to.initial_sequence_stride = args.initial_state.strides[0];
    to.initial_head_stride = args.initial_state.strides[1];
    to.initial_row_stride = args.initial_state.strides[2];
    to.wide_initial = has_wide_rows(args.initial_state);
  }
  to.final_state = args.final_state.as<float>();
  to.final_sequence_stride = args.final_state.strides[0];
  to.final_head_stride = args.final_state.strides[1];
  to.final_row_stride = args.final_state.strides[2];
  to.wide_final = has_wide_rows(args.final_state);
  to.key_dim = static_cast<std::int32_t>(args.k.shape[2]);
  to.value_dim = static_cast<std::int32_t>(args.v.shape[2]);
  to.heads_per_key_head = static_cast<std::int32_t>(args.v.shape[1] / args.k.shape[1]);
  to.is_value_key = args.state_layout == StateLayout::kValueKey;
  to.l2norm = args.qk_l2norm;
  to.scale = args.scale;
  return to;
}

// Calls launch(kernel, grid_x, grid_y, shared_bytes, kernel_args); arguments are valid.
template <typename Launch>
void launch_gated_delta(const GatedDeltaArgs& args, const Launch& launch) {
  GatedDeltaKernelArgs kernel_args = make_gated_delta_args(args);
  const auto kernel = [&]() -> void (*)(GatedDeltaKernelArgs) {
    if (args.v.dtype == kFloat32) return &gated_delta_kernel<float>;
    if (args.v.dtype == kBFloat16) return &gated_delta_kernel<BFloat16>;
    KVSPAN_ASSERT(args.v.dtype == kFloat16);
    return &gated_delta_kernel<Float16>;
  }();
  const std::int64_t strips = (args.v.shape[2] + kColumns - 1) / kColumns;
  const int shared_bytes = gated_delta_shared_floats(kernel_args.key_dim, args.q.data != nullptr) *
                           static_cast<int>(sizeof(float));
  const std::size_t num_sequences = args.cu_seqlens.size() - 1;
  for (std::size_t first = 0; first < num_sequences; first += kSequencesPerLaunch) {
    const std::size_t count = std::min<std::size_t>(kSequencesPerLaunch, num_sequences - first);
    std::copy_n(args.cu_seqlens.begin() + static_cast<std::ptrdiff_t>(first), count + 1,
                kernel_args.cu_seqlens);
    kernel_args.first_sequence = static_cast<std::int32_t>(first);
    launch(kernel, static_cast<unsigned>(args.v.shape[1] * strips), static_cast<unsigned>(count),
           shared_bytes, kernel_args);
  }
}

}  // namespace kvspan::cuda
