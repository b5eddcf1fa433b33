// What is kept of a call that explains it later: for reports, and in the black box.
#pragma once

#include <nanobind/nanobind.h>

#include "group.hpp"

namespace phalanx {

// Where the call comes from. With the GIL held, before the ticket is handed over.
void describe(Group& group, CallTicket& ticket, double timeout, bool is_async);
void describe(Group& group, MessageTicket& ticket, double timeout);

}  // namespace phalanx
