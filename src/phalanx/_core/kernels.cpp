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

#include "kernel_table.hpp"

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
  if (row >= kNumDTypes || column >= kNumReduceOps) return nullptr;
  return variant().table->fn[row][column];
}

std::size_t element_size(DType dtype) noexcept {
  switch (dtype) {
    case DType::bytes:
    case DType::boolean:
    case DType::uint8:
    case DType::int8:
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
    case DType::float8_e4m3fnuz:
    case DType::float8_e5m2fnuz:
      return 1;
    case DType::uint16:
    case DType::int16:
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::uint32:
    case DType::int32:
    case DType::float32:
    case DType::complex32:
      return 4;
    case DType::uint64:
    case DType::int64:
    case DType::float64:
    case DType::complex64:
      return 8;
    case DType::complex128:
      return 16;
  }
  return 1;  // an unknown dtype moves as bytes
}

const char* kernel_variant() noexcept { return variant().name; }

}  // namespace phalanx
