// What is kept of a call that explains it later: for reports, and in the black box.
#pragma once

#include <nanobind/nanobind.h>

#include "group_end.hpp"

namespace phalanx {

// Writes down where the call comes from, for peers and in the black box. With the GIL held, before the ticket is handed
// over.
void record_call(GroupEnd& group, CallTicket& ticket, double timeout, bool is_async);
void record_call(GroupEnd& group, MessageTicket& ticket, double timeout);

}  // namespace phalanx
