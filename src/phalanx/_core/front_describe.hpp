// Calls of torch's methods that another engine carries out: described, and not made.
#pragma once

#include <nanobind/nanobind.h>

namespace phalanx {

void bind_front_describe(nanobind::module_& module);

}  // namespace phalanx
