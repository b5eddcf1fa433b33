// The part of DLPack's C exchange API that the front uses to read tensors: version 1 of the ABI, as its specification
// lays it out. torch gives the table as a capsule, torch.Tensor.__dlpack_c_exchange_api__.
#pragma once

#include <cstdint>

namespace phalanx::dlpack {

inline constexpr char kCapsule[] = "dlpack_exchange_api";
inline constexpr std::uint32_t kMajor = 1;
// Types of devices.
inline constexpr std::int32_t kCpu = 1, kCuda = 2, kCudaHost = 3, kRocm = 10, kOneApi = 14;

// Codes of DataType.
enum : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4m3fn = 10,
  kFloat8E4m3fnuz = 11,
  kFloat8E5m2 = 12,
  kFloat8E5m2fnuz = 13,
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

struct ExchangeApi {
  struct {
    std::uint32_t major, minor;
  } version;
  ExchangeApi* previous;  // an older version of the table, or nullptr
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  // Fills in a tensor that belongs to the Python object. 0: done; else a Python exception is set.
  int (*borrow_from_object)(void* object, Tensor* filled);
  void* current_stream;
};

}  // namespace phalanx::dlpack
