// Between the driver of the CPU rerope and its kernels, one set per instruction set.
//
// The kernels' source files are compiled for instruction sets that this machine may lack, so they
// must not instantiate anything the linker could share with baseline code: this header and
// rerope_cpu_{float8*,kernel,packed,prefetch,stages,vector}.h hold plain structs and functions of
// internal linkage, no standard library templates.
#pragma once

#include <cstdint>

namespace kvspan::cpu {

// Table entries behind the last one that kernels may read: one step of the widest set.
inline constexpr std::int64_t kTablePadding = 64;

// A block is num_outer x num_inner pieces, each contiguous: rows of row_size elements, of which
// rotary_dim are rotated from rotary_offset on; or, in the packed layouts, the keys and values of
// one head (num_inner is 1), where row_size is head_dim and a piece has 2 * block_size * head_dim
// elements.
struct RotateArgs {
  const void* src;  // one block
  void* dst;        // the same; equal to src, or not overlapping it
  // The blocks of the call to come, to be fetched into the cache meanwhile; null for none.
  const void* next_src;
  const void* next_dst;
  std::int64_t num_outer, num_inner;
  std::int64_t src_outer_stride, src_inner_stride;  // elements
  std::int64_t dst_outer_stride, dst_inner_stride;
  std::int64_t row_size, rotary_offset, rotary_dim;
  std::int64_t block_size;  // packed layouts only
  bool stream;              // write past the caches, which what is written would only fill: other
                            // threads see it once the caller has ended the stream
  const float* cos_table;   // as its RotateKernel says, with kTablePadding entries behind
  const float* sin_table;
};

using RotateBlock = void (*)(const RotateArgs& args);

// Of a kernel's step of elements, the vectors of floats that hold them, and of its tables.
enum class ElementOrder {
  kPlain,
  kEvenOdd,    // first the even elements, then the odd ones
  kLanes,      // of each 16 elements four to a vector: as bytes come apart within lanes of 128 bits
  kPairLanes,  // the even elements, then the odd ones, each of each 16 elements four to a vector
};

struct RotateKernel {
  RotateBlock run = nullptr;                  // null where a layout does not hold the type
  ElementOrder order = ElementOrder::kPlain;  // of each step of a table; the last has gaps, or,
                                              // of kLanes and half full, its entries twice
  std::int64_t step = 1;                      // elements
  // A table has an entry for each element, -sin and +sin in turn, rather than for each pair.
  bool expanded = false;
};

enum StorageType { kStoreF32, kStoreBF16, kStoreF16, kStoreE4M3, kStoreE5M2, kNumStorageTypes };

struct RotateKernels {
  RotateKernel rows[kNumStorageTypes][2];  // [is_neox]
  RotateKernel vec[kNumStorageTypes][2];
  RotateKernel amx[2];  // of bfloat16
};

RotateKernels rotate_kernels_baseline();
RotateKernels rotate_kernels_avx2();         // x86-64 only
RotateKernels rotate_kernels_avx512();       // x86-64 only
RotateKernels rotate_kernels_avx512_vbmi();  // x86-64 only

}  // namespace kvspan::cpu
