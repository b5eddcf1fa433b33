// What is kept of a call that explains it later: for reports, and in the black box.
#pragma once

#include <nanobind/nanobind.h>

#include "group.hpp"

namespace phalanx {

// Where the call comes from and what its tensors look like; `sizes` as shape_of takes them. With the GIL held, before
// the ticket is handed over.
void describe(Group& group, CallTicket& ticket, nanobind::handle sizes, double timeout, bool is_async);
void describe(Group& group, MessageTicket& ticket, nanobind::handle sizes, double timeout);

}  // namespace phalanx
