// Agreements, for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace phalanx {

void bind_agreement(nanobind::module_& module);

}  // namespace phalanx
