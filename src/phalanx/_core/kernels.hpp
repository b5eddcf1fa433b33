// Reductions over raw memory: the arithmetic of every reduce op for every dtype, in rank order.
//
// The rules that make results the same on every rank, run, path and CPU:
//   - element i of the result is ((s0[i] op s1[i]) op s2[i]) ..., sources in rank order 0..n-1;
//   - 16- and 8-bit floats are widened to float32, accumulated there and rounded once, to nearest even;
//   - AVG is the sum and then one division; PREMUL_SUM multiplies each source by its own factor, then sums;
//   - a reduction may stop after any source and go on later, from its accumulator, without a rounding in between;
//   - MIN and MAX propagate NaN; no contraction of a*b+c (compiled with -ffp-contract=off).
// Each variant (baseline, AVX2) is the same source compiled with other flags; a table is chosen at run time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "dtypes.hpp"

namespace phalanx {

// torch's numbering of ReduceOp.
enum class ReduceOp : std::uint8_t {
  sum = 0,
  avg = 1,
  product = 2,
  min = 3,
  max = 4,
  band = 5,
  bor = 6,
  bxor = 7,
  premul_sum = 8
};
// By number, as torch spells them.
inline constexpr std::array<std::string_view, 9> kReduceOpNames{"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                                                "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
inline constexpr std::size_t kNumReduceOps = kReduceOpNames.size();
static_assert(kReduceOpNames[static_cast<std::size_t>(ReduceOp::premul_sum)] == "PREMUL_SUM");

// One part of a reduction whose sources come one part after another: from host to host, say. All parts together give
// the bits that one call over all sources gives.
struct Carry {
  // The running values of the parts before, in accumulation precision (accumulator_size() bytes per element); nullptr:
  // this part is the first.
  const void* in = nullptr;
  // Where this part leaves its running values, instead of rounding them into dst; nullptr: it is the last part. May be
  // `in`.
  void* out = nullptr;
  // Of all parts together; AVG divides by it. The last part needs it.
  std::size_t num_srcs = 0;
};

// dst[i] = reduction of srcs[0][i] .. srcs[num_srcs-1][i] for i in [0, count), in elements.
// dst may be exactly one of the srcs; otherwise nothing overlaps. num_srcs >= 1, or >= 0 with carry->in.
// Pointers are aligned to the element, or to the accumulator. factors has num_srcs entries and is read by premul_sum
// only. With carry->out, dst is not used. Without `carry`, the srcs are all there are.
using ReduceFn = void (*)(void* dst, const void* const* srcs, std::size_t num_srcs, std::size_t count,
                          const double* factors, const Carry* carry);

// One table per variant: the whole of kernels_impl.hpp under its own flags.
struct KernelTable {
  ReduceFn fn[kNumReducible][kNumReduceOps];  // nullptr where the dtype does not have the op
};
extern const KernelTable kBaselineKernels;
extern const KernelTable kAvx2Kernels;  // exists on x86-64 only

// The kernel for this CPU, or nullptr where the dtype does not have the op (see kernels.cpp for the table).
ReduceFn reduce_kernel(DType dtype, ReduceOp op) noexcept;

// "avx2" or "baseline": which table reduce_kernel uses. The environment variable PHALANX_KERNELS=baseline
// selects the baseline on any CPU, read once; it exists so that tests can compare the two.
const char* kernel_variant() noexcept;

}  // namespace phalanx
