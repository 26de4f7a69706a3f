// The causal convolution and how it is launched; see kvspan/causal_conv1d.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "common.cuh"
#include "kvspan/causal_conv1d.h"
#include "kvspan/check.h"

namespace kvspan::cuda {

constexpr int kConvSequencesPerLaunch = 384;
// Tokens that one thread works on, with its channels' weights in registers.
constexpr int kConvTokens = 32;

struct ConvKernelArgs {
  const void* x;
  const void* weight;
  const void* bias;  // null: none
  void* state;
  void* out;
  std::int64_t x_token_stride, out_token_stride;
  std::int64_t weight_channel_stride, weight_stride, bias_stride;
  std::int64_t state_sequence_stride, state_channel_stride, state_stride;
  std::int64_t num_channels;
  std::int32_t width;
  std::int32_t first_sequence, num_sequences;  // of this launch
  std::uint32_t parts_per_sequence;            // of kConvTokens tokens
  bool silu;
  std::int64_t cu_seqlens[kConvSequencesPerLaunch + 1];
};
static_assert(sizeof(ConvKernelArgs) <= 4096, "what kernel parameters may take everywhere");

// Input `token` of a sequence from `begin` on; before it, what the state carries.
template <typename T>
__device__ inline float conv_input(const ConvKernelArgs& args, std::int64_t sequence,
                                   std::int64_t begin, std::int64_t token, std::int64_t channel) {
  if (token >= begin) {
    return to_float(static_cast<const T*>(args.x)[token * args.x_token_stride + channel]);
  }
  return to_float(static_cast<const T*>(
      args.state)[sequence * args.state_sequence_stride + channel * args.state_channel_stride +
                  (token - begin + args.width - 1) * args.state_stride]);
}

// Tokens [first, end) of sequence n of the launch, for kPack channels, as one access. kWidth: of
// weights, or 0 for any up to kMaxConvWidth.
template <typename T, int kPack, int kWidth>
__device__ inline void convolve_channels(const ConvKernelArgs& args, unsigned n, std::int64_t begin,
                                         std::int64_t first, std::int64_t end,
                                         std::int64_t channel) {
  using Access = Pack<T, kPack, static_cast<int>(sizeof(T)) * kPack>;
  constexpr int kMost = kWidth ? kWidth : static_cast<int>(kMaxConvWidth);
  const int width = kWidth ? kWidth : args.width;
  float weight[kMost][kPack], window[kMost][kPack], bias[kPack];
  for (int i = 0; i < kPack; ++i) {
    const std::int64_t c = channel + i;
    bias[i] = args.bias ? to_float(static_cast<const T*>(args.bias)[c * args.bias_stride]) : 0.0f;
    KVSPAN_UNROLL
    for (int w = 0; w < kMost; ++w) {
      if (w >= width) break;
      weight[w][i] = to_float(static_cast<const T*>(
          args.weight)[c * args.weight_channel_stride + w * args.weight_stride]);
      if (w > 0) {
        window[w][i] = conv_input<T>(args, args.first_sequence + n, begin, first - width + w, c);
      }
    }
  }
  for (std::int64_t token = first; token < end; ++token) {
    const Access in = *reinterpret_cast<const Access*>(static_cast<const T*>(args.x) +
                                                       token * args.x_token_stride + channel);
    Access result;
    for (int i = 0; i < kPack; ++i) {
      float y = bias[i];
      KVSPAN_UNROLL
      for (int w = 0; w < kMost; ++w) {
        if (w >= width) break;
        window[w][i] =
            w + 1 < width ? window[w + 1 < kMost ? w + 1 : w][i] : to_float(in.values[i]);
        y = fmaf(weight[w][i], window[w][i], y);
      }
      result.values[i] = from_float<T>(args.silu ? y / (1.0f + expf(-y)) : y);
    }
    *reinterpret_cast<Access*>(static_cast<T*>(args.out) + token * args.out_token_stride +
                               channel) = result;
  }
}

template <typename T, int kPack, int kWidth>
__global__ void __launch_bounds__(kThreadsPerBlock)
    causal_conv1d_kernel(const __grid_constant__ ConvKernelArgs args) {
  const unsigned n = blockIdx.x / args.parts_per_sequence;
  const std::int64_t begin = args.cu_seqlens[n], sequence_end = args.cu_seqlens[n + 1];
  const std::int64_t first =
      begin + std::int64_t{blockIdx.x % args.parts_per_sequence} * kConvTokens;
  const std::int64_t end = sequence_end < first + kConvTokens ? sequence_end : first + kConvTokens;
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.x * kPack;
  for (std::int64_t channel = (std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kPack;
       first < end && channel < args.num_channels; channel += step) {
    convolve_channels<T, kPack, kWidth>(args, n, begin, first, end, channel);
  }
}

// After the convolution: each sequence's last width - 1 inputs.
template <typename T>
__global__ void __launch_bounds__(kThreadsPerBlock)
    conv_state_kernel(const __grid_constant__ ConvKernelArgs args) {
  const unsigned n = blockIdx.x;
  const std::int64_t begin = args.cu_seqlens[n], end = args.cu_seqlens[n + 1];
  const std::int64_t sequence = args.first_sequence + std::int64_t{n};
  for (std::int64_t channel = std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
       channel < args.num_channels; channel += std::int64_t{gridDim.y} * blockDim.x) {
    T* state = static_cast<T*>(args.state) + sequence * args.state_sequence_stride +
               channel * args.state_channel_stride;
    // In order: an element is read before it is overwritten.
    for (int w = 0; w + 1 < args.width; ++w) {
      const std::int64_t token = end - (args.width - 1) + w;
      state[w * args.state_stride] =
          token >= begin ? static_cast<const T*>(args.x)[token * args.x_token_stride + channel]
                         : state[(token - begin + args.width - 1) * args.state_stride];
    }
  }
}

template <typename T, typename Launch>
void launch_causal_conv1d_as(const CausalConv1dArgs& args, const Launch& launch) {
  constexpr int kPack = kVectorBytes / static_cast<int>(sizeof(T));
  ConvKernelArgs to{};
  to.x = args.x.data;
  to.x_token_stride = args.x.strides[0];
  to.weight = args.weight.data;
  to.weight_channel_stride = args.weight.strides[0];
  to.weight_stride = args.weight.strides[1];
  to.bias = args.bias.data;
  to.bias_stride = args.bias.strides[0];
  to.state = args.state.data;
  to.state_sequence_stride = args.state.strides[0];
  to.state_channel_stride = args.state.strides[1];
  to.state_stride = args.state.strides[2];
  to.out = args.out.data;
  to.out_token_stride = args.out.strides[0];
  to.num_channels = args.x.shape[1];
  to.width = static_cast<std::int32_t>(args.weight.shape[1]);
  to.silu = args.silu;
  const std::int64_t all =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(args.x.data)) |
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(args.out.data)) |
      std::int64_t{sizeof(T)} * (to.x_token_stride | to.out_token_stride | to.num_channels);
  const bool wide = to.width == 4 && all % kVectorBytes == 0;
  const auto blocks = [&](std::int64_t channels_per_thread) {
    const std::int64_t per_block = kThreadsPerBlock * channels_per_thread;
    return static_cast<unsigned>((to.num_channels + per_block - 1) / per_block);
  };
  const std::size_t num_sequences = args.cu_seqlens.size() - 1;
  for (std::size_t first = 0; first < num_sequences; first += kConvSequencesPerLaunch) {
    const std::size_t count = std::min<std::size_t>(kConvSequencesPerLaunch, num_sequences - first);
    std::copy_n(args.cu_seqlens.begin() + static_cast<std::ptrdiff_t>(first), count + 1,
                to.cu_seqlens);
    to.first_sequence = static_cast<std::int32_t>(first);
    std::int64_t longest = 1;
    for (std::size_t n = 0; n < count; ++n) {
      longest = std::max(longest, to.cu_seqlens[n + 1] - to.cu_seqlens[n]);
    }
    const std::int64_t parts = (longest + kConvTokens - 1) / kConvTokens;
    to.parts_per_sequence = static_cast<std::uint32_t>(parts);
    const auto grid_x = static_cast<unsigned>(parts * static_cast<std::int64_t>(count));
    if (wide) {
      launch(&causal_conv1d_kernel<T, kPack, 4>, grid_x, blocks(kPack), to);
    } else {
      launch(&causal_conv1d_kernel<T, 1, 0>, grid_x, blocks(1), to);
    }
    if (to.width > 1) launch(&conv_state_kernel<T>, static_cast<unsigned>(count), blocks(1), to);
  }
}

// Calls launch(kernel, grid_x, grid_y, kernel_args); arguments are valid.
template <typename Launch>
void launch_causal_conv1d(const CausalConv1dArgs& args, const Launch& launch) {
  if (args.x.dtype == kFloat32) {
    launch_causal_conv1d_as<float>(args, launch);
  } else if (args.x.dtype == kBFloat16) {
    launch_causal_conv1d_as<BFloat16>(args, launch);
  } else {
    KVSPAN_ASSERT(args.x.dtype == kFloat16);
    launch_causal_conv1d_as<Float16>(args, launch);
  }
}

}  // namespace kvspan::cuda
