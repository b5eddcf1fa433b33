// Methods of a group that torch calls without a Python frame of ours.
#pragma once

#include <nanobind/nanobind.h>

namespace phalanx {

void bind_front_method(nanobind::module_& module);

}  // namespace phalanx
