// What Python sees of a call and of a failure: the facts of a report, by name.
#pragma once

#include <nanobind/nanobind.h>

namespace phalanx {

void bind_description(nanobind::module_& module);

}  // namespace phalanx
