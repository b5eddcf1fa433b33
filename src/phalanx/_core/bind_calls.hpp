// The calls of a group, for Python.
#pragma once

#include <nanobind/nanobind.h>

#include "group.hpp"

namespace phalanx {

void bind_calls(nanobind::module_& module, nanobind::class_<Group>& group);

// The kernel for numbers from Python, which may be anything; nullptr where there is none.
ReduceFn kernel_of(int dtype, int op);

}  // namespace phalanx
