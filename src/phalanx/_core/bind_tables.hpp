// The tables of ops and dtypes, for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace phalanx {

void bind_tables(nanobind::module_& module);

}  // namespace phalanx
