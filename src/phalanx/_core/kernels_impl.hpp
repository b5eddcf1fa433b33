// The kernels of one variant: loops over the elements, and the table of all of them.
//
// This file and what it includes are compiled once a variant, with other flags each time. A function that the linker
// sees in both could come with AVX2 instructions and be called by the baseline. So everything is in an anonymous
// namespace, and no function of the standard library is called.
//
// Ways with one result:
//   - a dtype that accumulates in itself and has up to kPassSources sources takes one pass over all elements;
//   - else the elements go block by block. The sources of a pass are widened into a block each (or read in place),
//     the accumulator is a block, and only the last pass writes dst: dst may be any of the sources;
//   - a part of a reduction (Carry) goes block by block, too: its first pass resumes the accumulator of the part before
//     it, and its last pass may leave an accumulator.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.hpp"
#include "reduce_rules.hpp"
#include "small_floats.hpp"

// Iterations are independent even where dst is one of the sources: each reads its elements before it writes one.
#if defined(__clang__)
#define PHALANX_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PHALANX_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace phalanx {
namespace {

inline constexpr std::size_t kBlockBytes = 4096;  // of one block of accumulators: all of a pass fit in the L1 cache

// The rule is passed by value: nothing that the loop stores can then change it.
template <class Rule, std::size_t kNumSrcs, class T = typename Rule::Value>
[[gnu::noinline]] void run_loop(T* dst, const T* const* srcs, std::size_t count, const Rule rule) {
  const T* s0 = srcs[0];
  [[maybe_unused]] const T* s1 = kNumSrcs > 1 ? srcs[1] : nullptr;
  [[maybe_unused]] const T* s2 = kNumSrcs > 2 ? srcs[2] : nullptr;
  [[maybe_unused]] const T* s3 = kNumSrcs > 3 ? srcs[3] : nullptr;
  PHALANX_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    T acc = rule.begin(s0[i]);
    if constexpr (kNumSrcs > 1) acc = rule.next(acc, s1[i], 1);
    if constexpr (kNumSrcs > 2) acc = rule.next(acc, s2[i], 2);
    if constexpr (kNumSrcs > 3) acc = rule.next(acc, s3[i], 3);
    dst[i] = rule.finish(acc);
  }
}

template <class Rule, class T = typename Rule::Value>
void run_pass(T* dst, const T* const* pass_srcs, std::size_t num_pass_srcs, const double* pass_factors,
              std::size_t num_srcs, std::size_t count) {
  static_assert(kPassSources == 4);
  const Rule rule(num_srcs, num_pass_srcs, pass_factors);
  switch (num_pass_srcs) {
    case 1:
      return run_loop<Rule, 1>(dst, pass_srcs, count, rule);
    case 2:
      return run_loop<Rule, 2>(dst, pass_srcs, count, rule);
    case 3:
      return run_loop<Rule, 3>(dst, pass_srcs, count, rule);
    default:
      return run_loop<Rule, 4>(dst, pass_srcs, count, rule);
  }
}

// Where the values of a block are: in the tensors themselves.
template <class T>
struct InPlace {
  static constexpr bool kNeedsBlocks = false;
  static constexpr std::size_t kNumBlocks = 1;  // the accumulator

  static const T* read(const void* src, std::size_t begin, std::size_t /*count*/, T* /*block*/) {
    return static_cast<const T*>(src) + begin;
  }
  static T* result(void* dst, std::size_t begin, T* /*block*/) { return static_cast<T*>(dst) + begin; }
  static void write(void* /*dst*/, std::size_t /*begin*/, std::size_t /*count*/, const T* /*result*/) {}
};

// Or widened into blocks. A value is one float, or more that are stored one after another.
template <class Format, class T>
struct Widened {
  static constexpr bool kNeedsBlocks = true;
  static constexpr std::size_t kNumBlocks = kPassSources;
  static constexpr std::size_t kParts = sizeof(T) / sizeof(float);
  using Stored = typename Format::Stored;

  static const T* read(const void* src, std::size_t begin, std::size_t count, T* block) {
    widen_all<Format>(static_cast<const Stored*>(src) + begin * kParts, reinterpret_cast<float*>(block),
                      count * kParts);
    return block;
  }
  static T* result(void* /*dst*/, std::size_t /*begin*/, T* block) { return block; }
  static void write(void* dst, std::size_t begin, std::size_t count, const T* result) {
    narrow_all<Format>(reinterpret_cast<const float*>(result), static_cast<Stored*>(dst) + begin * kParts,
                       count * kParts);
  }
};

// One block of elements, in as many passes as the sources need. blocks[0] holds the accumulator between passes.
template <class Access, class Rule, class T = typename Rule::Value, std::size_t kBlock>
void reduce_block(void* dst, const void* const* srcs, std::size_t num_srcs, std::size_t begin, std::size_t count,
                  const double* factors, const Carry& carry, T (*blocks)[kBlock]) {
  const T* pass_srcs[kPassSources];
  double pass_factors[kPassSources];
  std::size_t filled = 0;
  std::size_t k = 0;
  const auto resume = [&](const T* accumulator) {
    pass_srcs[0] = accumulator;
    pass_factors[0] = 1.0;
    filled = 1;
  };
  if (carry.in != nullptr) resume(static_cast<const T*>(carry.in) + begin);
  while (true) {
    for (; filled < kPassSources && k < num_srcs; ++filled, ++k) {
      pass_srcs[filled] = Access::read(srcs[k], begin, count, blocks[filled % Access::kNumBlocks]);
      if constexpr (Rule::kHasFactors) pass_factors[filled] = factors[k];
    }
    if (k == num_srcs) break;
    run_pass<typename Rule::Partial>(blocks[0], pass_srcs, filled, pass_factors, carry.num_srcs, count);
    resume(blocks[0]);
  }
  if (carry.out != nullptr) {
    T* out = static_cast<T*>(carry.out) + begin;
    return run_pass<typename Rule::Partial>(out, pass_srcs, filled, pass_factors, carry.num_srcs, count);
  }
  T* result = Access::result(dst, begin, blocks[0]);
  run_pass<Rule>(result, pass_srcs, filled, pass_factors, carry.num_srcs, count);
  Access::write(dst, begin, count, result);
}

template <class Access, class Rule, class T = typename Rule::Value>
[[gnu::noinline]] void reduce_blocks(void* dst, const void* const* srcs, std::size_t num_srcs, std::size_t count,
                                     const double* factors, const Carry& carry) {
  constexpr std::size_t kBlock = kBlockBytes / sizeof(T);
  alignas(64) T blocks[Access::kNumBlocks][kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t rest = count - begin;
    reduce_block<Access, Rule>(dst, srcs, num_srcs, begin, rest < kBlock ? rest : kBlock, factors, carry, blocks);
  }
}

template <class Access, class Rule, class T = typename Rule::Value>
void reduce(void* dst, const void* const* srcs, std::size_t num_srcs, std::size_t count, const double* factors,
            const Carry* carry) {
  if (carry != nullptr) return reduce_blocks<Access, Rule>(dst, srcs, num_srcs, count, factors, *carry);
  if constexpr (!Access::kNeedsBlocks) {
    if (num_srcs <= kPassSources) {
      const T* pass_srcs[kPassSources];
      for (std::size_t k = 0; k < num_srcs; ++k) pass_srcs[k] = static_cast<const T*>(srcs[k]);
      return run_pass<Rule>(static_cast<T*>(dst), pass_srcs, num_srcs, factors, num_srcs, count);
    }
  }
  reduce_blocks<Access, Rule>(dst, srcs, num_srcs, count, factors, {nullptr, nullptr, num_srcs});
}

// A kernel for elements that it sees as kParts elements of its own each.
template <ReduceFn kKernel, std::size_t kParts>
void reduce_parts(void* dst, const void* const* srcs, std::size_t num_srcs, std::size_t count, const double* factors,
                  const Carry* carry) {
  kKernel(dst, srcs, num_srcs, count * kParts, factors, carry);
}

template <class Operation, class T>
constexpr ReduceFn kFold = reduce<InPlace<T>, Fold<T, Operation>>;

class TableMaker {
 public:
  consteval KernelTable make() {
    set_boolean();
    set_integer<std::uint8_t, std::uint8_t>(DType::uint8);
    set_integer<std::int8_t, std::uint8_t>(DType::int8);
    set_integer<std::uint16_t, std::uint16_t>(DType::uint16);
    set_integer<std::int16_t, std::uint16_t>(DType::int16);
    set_integer<std::uint32_t, std::uint32_t>(DType::uint32);
    set_integer<std::int32_t, std::uint32_t>(DType::int32);
    set_integer<std::uint64_t, std::uint64_t>(DType::uint64);
    set_integer<std::int64_t, std::uint64_t>(DType::int64);
    set_float<InPlace<float>, float>(DType::float32);
    set_float<InPlace<double>, double>(DType::float64);
    set_float<Widened<Float16, float>, float>(DType::float16);
    set_float<Widened<BFloat16, float>, float>(DType::bfloat16);
    set_float<Widened<Float8E4M3Fn, float>, float>(DType::float8_e4m3fn);
    set_float<Widened<Float8E5M2, float>, float>(DType::float8_e5m2);
    set_float<Widened<Float8E4M3Fnuz, float>, float>(DType::float8_e4m3fnuz);
    set_float<Widened<Float8E5M2Fnuz, float>, float>(DType::float8_e5m2fnuz);
    set_complex<InPlace<float>, InPlace<Complex<float>>, float>(DType::complex64);
    set_complex<InPlace<double>, InPlace<Complex<double>>, double>(DType::complex128);
    set_complex<Widened<Float16, float>, Widened<Float16, Complex<float>>, float>(DType::complex32);
    return table_;
  }

 private:
  constexpr void set(DType dtype, ReduceOp op, ReduceFn kernel) {
    table_.fn[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)] = kernel;
  }

  constexpr void set_boolean() {
    set(DType::boolean, ReduceOp::sum, kFold<BitOr, std::uint8_t>);
    set(DType::boolean, ReduceOp::max, kFold<BitOr, std::uint8_t>);
    set(DType::boolean, ReduceOp::bor, kFold<BitOr, std::uint8_t>);
    set(DType::boolean, ReduceOp::product, kFold<BitAnd, std::uint8_t>);
    set(DType::boolean, ReduceOp::min, kFold<BitAnd, std::uint8_t>);
    set(DType::boolean, ReduceOp::band, kFold<BitAnd, std::uint8_t>);
    set(DType::boolean, ReduceOp::bxor, kFold<BitXor, std::uint8_t>);
  }

  // What does not depend on the sign is done by the kernels of the unsigned type U, what depends on no type by bytes.
  template <class T, class U>
  constexpr void set_integer(DType dtype) {
    set(dtype, ReduceOp::sum, kFold<Add, U>);
    set(dtype, ReduceOp::product, kFold<Multiply, U>);
    set(dtype, ReduceOp::min, kFold<Min, T>);
    set(dtype, ReduceOp::max, kFold<Max, T>);
    set(dtype, ReduceOp::avg, reduce<InPlace<T>, Average<T>>);
    set(dtype, ReduceOp::premul_sum, reduce<InPlace<U>, PremulSum<U>>);
    set(dtype, ReduceOp::band, reduce_parts<kFold<BitAnd, std::uint8_t>, sizeof(T)>);
    set(dtype, ReduceOp::bor, reduce_parts<kFold<BitOr, std::uint8_t>, sizeof(T)>);
    set(dtype, ReduceOp::bxor, reduce_parts<kFold<BitXor, std::uint8_t>, sizeof(T)>);
  }

  template <class Access, class T>
  constexpr void set_float(DType dtype) {
    set(dtype, ReduceOp::sum, reduce<Access, Fold<T, Add>>);
    set(dtype, ReduceOp::product, reduce<Access, Fold<T, Multiply>>);
    set(dtype, ReduceOp::min, reduce<Access, Fold<T, Min>>);
    set(dtype, ReduceOp::max, reduce<Access, Fold<T, Max>>);
    set(dtype, ReduceOp::avg, reduce<Access, Average<T>>);
    set(dtype, ReduceOp::premul_sum, reduce<Access, PremulSum<T>>);
  }

  // Only the product mixes the two parts of a complex number.
  template <class PartAccess, class Access, class T>
  constexpr void set_complex(DType dtype) {
    set(dtype, ReduceOp::sum, reduce_parts<reduce<PartAccess, Fold<T, Add>>, 2>);
    set(dtype, ReduceOp::avg, reduce_parts<reduce<PartAccess, Average<T>>, 2>);
    set(dtype, ReduceOp::premul_sum, reduce_parts<reduce<PartAccess, PremulSum<T>>, 2>);
    set(dtype, ReduceOp::product, reduce<Access, Fold<Complex<T>, Multiply>>);
  }

  KernelTable table_{};
};

consteval KernelTable make_kernels() { return TableMaker().make(); }

}  // namespace
}  // namespace phalanx
