// Chooses the kernels for this CPU, once.
//
//                    SUM  PRODUCT  MIN MAX  AVG  PREMUL_SUM  BAND BOR BXOR
//   bytes             -      -        -      -       -             -
//   boolean           x      x        x      -       -             x          SUM, MAX: or; PRODUCT, MIN: and
//   integers          x      x        x      x       x             x          wrap around; AVG truncates toward zero
//   floats            x      x        x      x       x             -
//   complex           x      x        -      x       x             -
#include "kernels.hpp"

#include <cstdlib>
#include <string_view>

namespace phalanx {
namespace {

struct Variant {
  const KernelTable* table;
  const char* name;
};

Variant choose_variant() noexcept {
#if PHALANX_HAVE_AVX2
  const char* demanded = std::getenv("PHALANX_KERNELS");
  const bool baseline = demanded != nullptr && std::string_view(demanded) == "baseline";
  if (!baseline && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    return {&kAvx2Kernels, "avx2"};
  }
#endif
  return {&kBaselineKernels, "baseline"};
}

const Variant& variant() noexcept {
  static const Variant chosen = choose_variant();
  return chosen;
}

}  // namespace

ReduceFn reduce_kernel(DType dtype, ReduceOp op) noexcept {
  const auto row = static_cast<std::size_t>(dtype);
  const auto column = static_cast<std::size_t>(op);
  if (row >= kNumReducible || column >= kNumReduceOps) return nullptr;
  return variant().table->fn[row][column];
}

const char* kernel_variant() noexcept { return variant().name; }

}  // namespace phalanx
