// What Python sees of the calls for which this process waits: for whoever looks for deadlocks.
#pragma once

#include <nanobind/nanobind.h>

#include "group_end.hpp"

namespace phalanx {

void bind_waits(nanobind::module_& module, nanobind::class_<GroupEnd>& group);

// Tells Python that a thread has waited for long. With the GIL held; raises what comes out of Python.
void tell_long();

}  // namespace phalanx
