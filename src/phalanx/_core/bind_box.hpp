// Black boxes, for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "group_end.hpp"

namespace phalanx {

// What Python holds of a box. A shared_ptr<BlackBox> made from a Python object would take the GIL wherever the last
// copy goes, and that may be a thread for which the interpreter waits.
struct HeldBox {
  std::shared_ptr<BlackBox> box;
};

void bind_box(nanobind::module_& module, nanobind::class_<GroupEnd>& group);

}  // namespace phalanx
