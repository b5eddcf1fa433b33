// The kernels for x86-64 CPUs with AVX2 and F16C: the only file compiled with those flags.
//
// Nothing here may run before the CPU was asked: the table is constinit, so that loading the module executes no code.
#include "kernels_impl.hpp"

namespace phalanx {

constinit const KernelTable kAvx2Kernels = make_kernels();

}  // namespace phalanx
