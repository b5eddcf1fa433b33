// The kernels for any CPU of this architecture.
#include "kernels_impl.hpp"

namespace phalanx {

constinit const KernelTable kBaselineKernels = make_kernels();

}  // namespace phalanx
