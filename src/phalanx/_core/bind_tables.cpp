#include "bind_tables.hpp"

#include <nanobind/stl/string_view.h>

#include "dtypes.hpp"
#include "ops.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

// The rows by number, as a tuple of objects that refer to the table.
template <typename Table>
nb::tuple rows_of(const Table& table) {
  nb::list rows;
  for (const auto& row : table) rows.append(nb::cast(&row, nb::rv_policy::reference));
  return nb::tuple(rows);
}

}  // namespace

void bind_tables(nb::module_& module) {
  nb::enum_<Peers>(module, "Peers", "Whom a rank waits for in a call.")
      .value("none", Peers::none)
      .value("root", Peers::root)
      .value("all", Peers::all)
      .value("peer", Peers::peer);
  nb::class_<OpTraits>(module, "OpTraits", "A row of the table of ops.")
      .def_ro("name", &OpTraits::name)
      .def_ro("is_message", &OpTraits::is_message)
      .def_ro("rooted", &OpTraits::rooted)
      .def_ro("reduces", &OpTraits::reduces)
      .def_ro("in_place", &OpTraits::in_place)
      .def_ro("shared_result", &OpTraits::shared_result)
      .def_ro("exchanges_sizes", &OpTraits::exchanges_sizes)
      .def_ro("shape_of_outputs", &OpTraits::shape_of_outputs)
      .def_ro("others_wait_for", &OpTraits::others_wait_for)
      .def_ro("root_waits_for", &OpTraits::root_waits_for)
      .def("__repr__", [](const OpTraits& self) { return nb::str("<op {}>").format(self.name); });
  nb::class_<DTypeTraits>(module, "DTypeTraits", "A row of the table of dtypes.")
      .def_ro("name", &DTypeTraits::name)
      .def_ro("width", &DTypeTraits::width)
      .def("__repr__", [](const DTypeTraits& self) { return nb::str("<dtype {}>").format(self.name); });
  module.attr("OPS") = rows_of(kOps);
  module.attr("DTYPES") = rows_of(kDTypes);
  module.attr("NUM_REDUCIBLE") = kNumReducible;
  module.attr("OTHER_DTYPE") = static_cast<int>(DType::other);
}

}  // namespace phalanx
