// The 8- and 16-bit floats: widening to float32, which is exact, and narrowing from it, to nearest even.
//
// The results are those of torch 2.13, overflow included: float16, bfloat16 and e5m2 overflow to infinity, e4m3fn
// saturates (infinity too), the fnuz formats overflow to NaN. Which NaN comes out is not defined. All of it is
// branchless arithmetic, so that the loops vectorise on any CPU (for the 8-bit formats that is as fast as a table), and
// no float32 on the way is subnormal unless the input was: a thread that flushes subnormals to zero gets the same
// conversions. Included once a kernel variant; kernels_impl.hpp says why everything is in an anonymous namespace.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace phalanx {
namespace {

// std::bit_cast is a function, which the linker could take from another variant.
constexpr std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
constexpr float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

// For numbers below 2^31 only: SSE2 has no comparison of unsigned numbers.
constexpr bool less(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::int32_t>(a) < static_cast<std::int32_t>(b);
}

// How a format spells what is not a finite number.
enum class Specials {
  ieee,  // an exponent of all ones: infinity where the mantissa is 0, else NaN
  fn,    // NaN where exponent and mantissa are all ones; no infinity
  fnuz,  // NaN where the others have -0; no infinity, no -0
};

template <class StoredT, int kExponentBits, int kMantissaBits, int kBias, Specials kSpecials>
struct SmallFloat {
  using Stored = StoredT;

  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr std::uint32_t kSignBit = 1u << (kExponentBits + kMantissaBits);
  static constexpr std::uint32_t kMagnitudeMask = kSignBit - 1;
  static constexpr std::uint32_t kMantissaMask = (1u << kMantissaBits) - 1;
  static constexpr std::uint32_t kInfinity = kMagnitudeMask & ~kMantissaMask;
  static constexpr std::uint32_t kNaN = kSpecials == Specials::ieee ? kInfinity | (kMantissaMask + 1) >> 1
                                        : kSpecials == Specials::fn ? kMagnitudeMask
                                                                    : kSignBit;
  static constexpr std::uint32_t kLargestFinite = kSpecials == Specials::ieee ? kInfinity - 1
                                                  : kSpecials == Specials::fn ? kMagnitudeMask - 1
                                                                              : kMagnitudeMask;
  static constexpr std::uint32_t kOverflow = kSpecials == Specials::ieee ? kInfinity
                                             : kSpecials == Specials::fn ? kLargestFinite
                                                                         : kNaN;

  // In float32's bits.
  static constexpr std::uint32_t kWideInfinity = 0x7f800000u;
  static constexpr std::uint32_t kWideNaN = 0x7fc00000u;
  static constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - kBias) << 23;
  static constexpr std::uint32_t kSmallestNormal = kRebias + (1u << 23);
  // The power of two whose last mantissa bit is worth one step between subnormals of this format.
  static constexpr std::uint32_t kSubnormalScale = kSmallestNormal + (static_cast<std::uint32_t>(kShift) << 23);

  static constexpr float widen(Stored stored) {
    const std::uint32_t code = stored;
    const std::uint32_t magnitude = code & kMagnitudeMask;
    const std::uint32_t sign = (code & kSignBit) << (31 - kExponentBits - kMantissaBits);
    const std::uint32_t normal = (magnitude << kShift) + kRebias;
    const float subnormal = float_of(magnitude + kSubnormalScale) - float_of(kSubnormalScale);
    std::uint32_t wide = less(kMantissaMask, magnitude) ? normal : bits_of(subnormal);
    if constexpr (kSpecials == Specials::ieee) {
      wide = less(kLargestFinite, magnitude) ? (magnitude << kShift) | kWideInfinity : wide;
    } else if constexpr (kSpecials == Specials::fn) {
      wide = less(kLargestFinite, magnitude) ? kWideNaN : wide;
    } else {
      wide = code == kNaN ? kWideNaN : wide;
    }
    return float_of(wide | sign);
  }

  static constexpr Stored narrow(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t sign = (bits >> 31) * kSignBit;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t odd = (magnitude >> kShift) & 1;
    const std::uint32_t normal = (magnitude - kRebias + ((1u << (kShift - 1)) - 1) + odd) >> kShift;
    // This addition rounds to nearest even at the right bit.
    const std::uint32_t subnormal = bits_of(float_of(magnitude) + float_of(kSubnormalScale)) - kSubnormalScale;
    std::uint32_t code = less(magnitude, kSmallestNormal) ? subnormal : normal;
    // Infinity and NaN have codes above the largest finite one here, too.
    code = less(kLargestFinite, code) ? kOverflow : code;
    if constexpr (kSpecials == Specials::fnuz) {
      code |= code == 0 ? 0 : sign;
    } else {
      code = (value != value ? kNaN : code) | sign;
    }
    return static_cast<Stored>(code);
  }
};

using Float16 = SmallFloat<std::uint16_t, 5, 10, 15, Specials::ieee>;
using Float8E4M3Fn = SmallFloat<std::uint8_t, 4, 3, 7, Specials::fn>;
using Float8E5M2 = SmallFloat<std::uint8_t, 5, 2, 15, Specials::ieee>;
using Float8E4M3Fnuz = SmallFloat<std::uint8_t, 4, 3, 8, Specials::fnuz>;
using Float8E5M2Fnuz = SmallFloat<std::uint8_t, 5, 2, 16, Specials::fnuz>;

// The upper half of a float32.
struct BFloat16 {
  using Stored = std::uint16_t;

  static constexpr float widen(Stored stored) { return float_of(static_cast<std::uint32_t>(stored) << 16); }

  static constexpr Stored narrow(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return static_cast<Stored>(value != value ? 0x7fc0u : rounded);
  }
};

// Not inlined, so that all ops of a dtype share one copy.
template <class Format>
[[gnu::noinline]] void widen_all(const typename Format::Stored* __restrict stored, float* __restrict wide,
                                 std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) wide[i] = Format::widen(stored[i]);
}

template <class Format>
[[gnu::noinline]] void narrow_all(const float* __restrict wide, typename Format::Stored* __restrict stored,
                                  std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) stored[i] = Format::narrow(wide[i]);
}

#if defined(__F16C__)
template <>
[[gnu::noinline]] void widen_all<Float16>(const std::uint16_t* __restrict stored, float* __restrict wide,
                                          std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(stored + i));
    _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(packed));
  }
  for (; i < count; ++i) wide[i] = Float16::widen(stored[i]);
}

template <>
[[gnu::noinline]] void narrow_all<Float16>(const float* __restrict wide, std::uint16_t* __restrict stored,
                                           std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(wide + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(stored + i), packed);
  }
  for (; i < count; ++i) stored[i] = Float16::narrow(wide[i]);
}
#endif

}  // namespace
}  // namespace phalanx
