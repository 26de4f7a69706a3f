// The parts of the DLPack 1.x C ABI that kvspan consumes, from the specification
// (https://dmlc.github.io/dlpack/latest/c_api.html). Layouts must not change.
#pragma once

#include <cstdint>

namespace kvspan::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr std::uint32_t kMinorVersion = 1;
inline constexpr std::uint64_t kFlagReadOnly = 1;

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

enum DeviceCode : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

struct Device {
  std::int32_t device_type;
  std::int32_t device_id;
};

enum TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBFloat = 4,
  kBool = 6,
  kFloat8E4M3FN = 10,
  kFloat8E5M2 = 12
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // null before 1.2 means C-contiguous
  std::uint64_t byte_offset;
};

// The capsule "dltensor".
struct ManagedTensor {
  Tensor tensor;
  void* manager_ctx;
  void (*deleter)(ManagedTensor*);
};

// The capsule "dltensor_versioned".
struct ManagedTensorVersioned {
  Version version;
  void* manager_ctx;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

// The capsule "dlpack_exchange_api", found as type(tensor).__dlpack_c_exchange_api__. Only the
// function that borrows a tensor is called; the others are here for their place in the struct.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  int (*managed_tensor_from_py_object)(void* py_object, ManagedTensorVersioned** out);
  void* managed_tensor_to_py_object;
  int (*tensor_from_py_object)(void* py_object, Tensor* out);  // may be null
  void* current_work_stream;
};

}  // namespace kvspan::dlpack
