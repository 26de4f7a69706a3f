// Between the driver of the CPU rerope and its kernels, one set per instruction set.
//
// The kernels' source files are compiled for instruction sets that this machine may lack, so they
// must not instantiate anything the linker could share with baseline code: this header and
// rerope_cpu_kernel.h hold plain structs and functions of internal linkage, no standard library
// templates.
#pragma once

#include <cstdint>

namespace kvspan::cpu {

// Table entries behind the last one that kernels may read: one vector of the widest set.
inline constexpr std::int64_t kTablePadding = 16;

struct RotateArgs {
  const void* src;  // one block, [num_outer, num_inner, head_dim]
  void* dst;        // the same; equal to src, or not overlapping it
  // The blocks of the call to come, to be fetched into the cache meanwhile; null for none.
  const void* next_src;
  const void* next_dst;
  std::int64_t num_outer, num_inner;
  std::int64_t src_outer_stride, src_inner_stride;  // elements
  std::int64_t dst_outer_stride, dst_inner_stride;
  std::int64_t head_dim, rotary_dim;
  // NeoX: [rotary_dim / 2] cosines and sines. Interleaved: [rotary_dim], each cosine twice, each
  // sine as -sin, +sin. Both with kTablePadding entries behind.
  const float* cos_table;
  const float* sin_table;
};

using RotateBlock = void (*)(const RotateArgs& args);

struct RotateKernels {
  RotateBlock float32[2], bfloat16[2], float16[2];  // [is_neox]
};

RotateKernels rotate_kernels_baseline();
RotateKernels rotate_kernels_avx2();    // x86-64 only
RotateKernels rotate_kernels_avx512();  // x86-64 only

}  // namespace kvspan::cpu
