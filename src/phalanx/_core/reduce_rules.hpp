// The arithmetic of the reduce ops on single values: how a reduction begins, goes on and ends.
//
// A rule is made for one pass over up to kPassSources sources and used as finish(next(.. begin(s0) .., sk, k)), where
// k counts within the pass. A pass that resumes an earlier one has the accumulator as its source 0, with factor 1.
// Integers wrap around. Included once a kernel variant; kernels_impl.hpp says why everything is in an anonymous
// namespace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace phalanx {
namespace {

inline constexpr std::size_t kPassSources = 4;

template <class T>
struct Complex {
  T re, im;
};

// What integers compute in: unsigned and not promoted to int, so that wrapping around is defined.
template <class T, bool = std::is_integral_v<T>>
struct Modular {
  using Type = T;
};
template <class T>
struct Modular<T, true> {
  using Type = std::conditional_t<sizeof(T) < sizeof(unsigned), unsigned, std::make_unsigned_t<T>>;
};
template <class T>
using ModularType = typename Modular<T>::Type;

struct Add {
  template <class T>
  static T combine(T a, T b) {
    return static_cast<T>(static_cast<ModularType<T>>(a) + static_cast<ModularType<T>>(b));
  }
};

struct Multiply {
  template <class T>
  static T combine(T a, T b) {
    return static_cast<T>(static_cast<ModularType<T>>(a) * static_cast<ModularType<T>>(b));
  }

  template <class T>
  static Complex<T> combine(Complex<T> a, Complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

// In Min and Max a NaN is taken and then stays: nothing compares with it. `|` because a branch would not vectorise.
struct Min {
  template <class T>
  static T combine(T a, T b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};

struct Max {
  template <class T>
  static T combine(T a, T b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};

struct BitAnd {
  template <class T>
  static T combine(T a, T b) {
    return a & b;
  }
};

struct BitOr {
  template <class T>
  static T combine(T a, T b) {
    return a | b;
  }
};

struct BitXor {
  template <class T>
  static T combine(T a, T b) {
    return a ^ b;
  }
};

template <class T, class Operation>
struct Fold {
  using Value = T;
  using Partial = Fold;  // the rule of the passes before the last
  static constexpr bool kHasFactors = false;

  Fold(std::size_t /*num_srcs*/, std::size_t /*num_pass_srcs*/, const double* /*pass_factors*/) {}
  T begin(T value) const { return value; }
  T next(T acc, T value, std::size_t) const { return Operation::combine(acc, value); }
  T finish(T acc) const { return acc; }
};

template <class T>
struct Average : Fold<T, Add> {
  using Partial = Fold<T, Add>;

  // Vector units don't divide integers: those of up to 32 bits divide as floats. That is exact. A quotient q that is
  // no integer is at least 1/divisor away from one, and rounding moves it by at most q * 2^-24 (2^-53 for double),
  // which is less, as q * divisor is below 2^16 (2^32).
  using Divisor = std::conditional_t<!std::is_integral_v<T> || sizeof(T) == 8, T,
                                     std::conditional_t<sizeof(T) == 4, double, float>>;

  Average(std::size_t num_srcs, std::size_t num_pass_srcs, const double* pass_factors)
      : Partial(num_srcs, num_pass_srcs, pass_factors), divisor(static_cast<Divisor>(num_srcs)) {}

  T finish(T acc) const {
    if constexpr (std::is_signed_v<T> && std::is_integral_v<T> && sizeof(T) < 8) {
      return static_cast<T>(static_cast<std::int32_t>(static_cast<Divisor>(acc) / divisor));
    } else {
      return static_cast<T>(static_cast<Divisor>(acc) / divisor);
    }
  }

  Divisor divisor;
};

template <class T>
struct PremulSum {
  using Value = T;
  using Partial = PremulSum;
  static constexpr bool kHasFactors = true;

  PremulSum(std::size_t /*num_srcs*/, std::size_t num_pass_srcs, const double* pass_factors) : factors{} {
    for (std::size_t k = 0; k < num_pass_srcs; ++k) factors[k] = converted(pass_factors[k]);
  }

  T begin(T value) const { return Multiply::combine(factors[0], value); }
  T next(T acc, T value, std::size_t k) const { return Add::combine(acc, Multiply::combine(factors[k], value)); }
  T finish(T acc) const { return acc; }

  // An integer's factor is an integral double within 64 bits.
  static T converted(double factor) {
    if constexpr (std::is_integral_v<T>) {
      const bool negative = factor < 0;
      return static_cast<T>(negative ? static_cast<std::uint64_t>(static_cast<std::int64_t>(factor))
                                     : static_cast<std::uint64_t>(factor));
    } else {
      return static_cast<T>(factor);
    }
  }

  T factors[kPassSources];
};

}  // namespace
}  // namespace phalanx
