// The short causal convolution in front of hybrid models' linear attention: each channel over its
// own last `width` inputs, then SiLU, with the inputs before the first token carried along.
//
//   y_t = bias + sum_{w < width} weight[w] x_{t - width + 1 + w},   out_t = y_t / (1 + exp(-y_t))
//
// Numerics: sums in float in the order of w, fused multiply-adds where the instruction set has
// them; the result is rounded to the storage type once.
#pragma once

#include <cstdint>
#include <span>

#include "kvspan/tensor_view.h"
#include "kvspan/vector_isa.h"

namespace kvspan {

inline constexpr std::int64_t kMaxConvWidth = 16;

// float32, bfloat16 or float16, one type for all tensors.
struct CausalConv1dArgs {
  TensorView x;       // [num_tokens, num_channels], channels contiguous, read
  TensorView weight;  // [num_channels, width], read
  TensorView bias;    // [num_channels], read; no data: none
  // [num_sequences, num_channels, width - 1], any strides, read and written: the inputs before a
  // sequence's first token, then those before the token after its last.
  TensorView state;
  TensorView out;  // [num_tokens, num_channels], channels contiguous, written
  // [num_sequences + 1] first token of each sequence, and the end; host memory on every device.
  std::span<const std::int64_t> cu_seqlens;
  bool silu = true;

  int num_threads = 0;               // CPU: 0 chooses by the size of the work
  VectorIsa isa = VectorIsa::kAuto;  // CPU
  void* stream = nullptr;            // CUDA: a cudaStream_t
};

// Validates and runs on the tensors' device. CUDA work is only enqueued on the stream.
// Throws ArgumentError, TypeError, DeviceError.
void causal_conv1d(const CausalConv1dArgs& args);

// The implementations; they assume valid arguments.
namespace cpu {
void causal_conv1d(const CausalConv1dArgs& args);
}
namespace cuda {
void causal_conv1d(const CausalConv1dArgs& args);
}

}  // namespace kvspan
