// The native front: torch's calls of a group, read, checked, described and handed over without a Python frame of ours.
//
// A FrontMethod stands for a method of the group in the group's class. It takes the spellings that torch uses and plain
// tensors; everything else goes on to the Python method that it was made with. That one normalises the arguments and
// comes back through Front's own methods, to the same checks (front_forms) and the same hand-over.
#pragma once

#include <nanobind/nanobind.h>

namespace phalanx {

void bind_front(nanobind::module_& module);

}  // namespace phalanx
