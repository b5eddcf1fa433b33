// The core's numbers, and the layouts of its records, for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace phalanx {

void bind_constants(nanobind::module_& module);

}  // namespace phalanx
