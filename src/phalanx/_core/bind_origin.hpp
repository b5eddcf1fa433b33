// Where in the program the call under way comes from, found in Python's frames.
#pragma once

#include <nanobind/nanobind.h>

#include "layout.hpp"
#include "location.hpp"

namespace phalanx {

// With the GIL held. The innermost frame that belongs to the program.
Origin origin_of_call();

// Of a tuple, the shape of a tensor; of a list, the sizes of several; none of anything else. `count` is the
// signature's: where ranks may differ their shapes may.
Shape shape_of(nanobind::handle sizes, std::int64_t count);

void bind_origin(nanobind::module_& module);

}  // namespace phalanx
