// The numbers, names and widths of dtypes. They are part of the signature and of the records in black boxes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace phalanx {

enum class DType : std::uint8_t {
  none = 0,  // the call has no tensors
  boolean = 1,
  uint8 = 2,
  int8 = 3,
  uint16 = 4,
  int16 = 5,
  uint32 = 6,
  int32 = 7,
  uint64 = 8,
  int64 = 9,
  float16 = 10,
  bfloat16 = 11,
  float32 = 12,
  float64 = 13,
  complex64 = 14,
  complex128 = 15,
  float8_e4m3fn = 16,
  float8_e5m2 = 17,
  float8_e4m3fnuz = 18,
  float8_e5m2fnuz = 19,
  complex32 = 20,  // float16 pairs, accumulated as complex64
  // Those that follow, in the order of kDTypes, only move.
  other = 255,  // one that is not listed below: Description::unlisted_dtype tells it from others
};

struct DTypeTraits {
  std::string_view name;  // without "torch."
  std::uint8_t width;     // bytes of an element
};

// By number.
inline constexpr std::array kDTypes{
    DTypeTraits{"none", 0},
    DTypeTraits{"bool", 1},
    DTypeTraits{"uint8", 1},
    DTypeTraits{"int8", 1},
    DTypeTraits{"uint16", 2},
    DTypeTraits{"int16", 2},
    DTypeTraits{"uint32", 4},
    DTypeTraits{"int32", 4},
    DTypeTraits{"uint64", 8},
    DTypeTraits{"int64", 8},
    DTypeTraits{"float16", 2},
    DTypeTraits{"bfloat16", 2},
    DTypeTraits{"float32", 4},
    DTypeTraits{"float64", 8},
    DTypeTraits{"complex64", 8},
    DTypeTraits{"complex128", 16},
    DTypeTraits{"float8_e4m3fn", 1},
    DTypeTraits{"float8_e5m2", 1},
    DTypeTraits{"float8_e4m3fnuz", 1},
    DTypeTraits{"float8_e5m2fnuz", 1},
    DTypeTraits{"complex32", 4},
    DTypeTraits{"float8_e8m0fnu", 1},
    DTypeTraits{"float4_e2m1fn_x2", 1},
    DTypeTraits{"qint8", 1},
    DTypeTraits{"quint8", 1},
    DTypeTraits{"qint32", 4},
    DTypeTraits{"bits1x8", 1},
    DTypeTraits{"bits2x4", 1},
    DTypeTraits{"bits4x2", 1},
    DTypeTraits{"bits8", 1},
    DTypeTraits{"bits16", 2},
    DTypeTraits{"int1", 1},
    DTypeTraits{"int2", 1},
    DTypeTraits{"int3", 1},
    DTypeTraits{"int4", 1},
    DTypeTraits{"int5", 1},
    DTypeTraits{"int6", 1},
    DTypeTraits{"int7", 1},
    DTypeTraits{"uint1", 1},
    DTypeTraits{"uint2", 1},
    DTypeTraits{"uint3", 1},
    DTypeTraits{"uint4", 1},
    DTypeTraits{"uint5", 1},
    DTypeTraits{"uint6", 1},
    DTypeTraits{"uint7", 1},
    DTypeTraits{"bcomplex32", 4},
};
// The first of them have arithmetic, but for `none`.
inline constexpr std::size_t kNumReducible = static_cast<std::size_t>(DType::complex32) + 1;
static_assert(kDTypes[kNumReducible - 1].name == "complex32");

constexpr bool is_listed(DType dtype) noexcept { return static_cast<std::size_t>(dtype) < kDTypes.size(); }

// Bytes of one element; 1 where nothing is known of it, or there is none.
constexpr std::size_t element_size(DType dtype) noexcept {
  const std::size_t width = is_listed(dtype) ? kDTypes[static_cast<std::size_t>(dtype)].width : 0;
  return width != 0 ? width : 1;
}

// Bytes of one element while it is being reduced: 16- and 8-bit floats are accumulated as float32, complex32 as
// complex64, every other dtype as itself.
constexpr std::size_t accumulator_size(DType dtype) noexcept {
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
    case DType::float8_e4m3fnuz:
    case DType::float8_e5m2fnuz:
      return 4;
    case DType::complex32:
      return 8;
    default:
      return element_size(dtype);
  }
}

}  // namespace phalanx
