// The tables that kernels.cpp chooses from: one a variant, each the whole of kernels_impl.hpp under its own flags.
#pragma once

#include "kernels.hpp"

namespace phalanx {

struct KernelTable {
  ReduceFn fn[kNumReducible][kNumReduceOps];  // nullptr where the dtype does not have the op
};

extern const KernelTable kBaselineKernels;
extern const KernelTable kAvx2Kernels;  // exists on x86-64 only

}  // namespace phalanx
