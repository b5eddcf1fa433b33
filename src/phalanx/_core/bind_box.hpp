// Black boxes, for Python.
#pragma once

#include <nanobind/nanobind.h>

#include "group.hpp"

namespace phalanx {

void bind_box(nanobind::module_& module, nanobind::class_<Group>& group);

}  // namespace phalanx
