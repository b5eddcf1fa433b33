// What Python sees of a group in trouble: black boxes, questions between ranks, slow calls, testimonies.
#pragma once

#include <nanobind/nanobind.h>

#include "calling.hpp"

namespace phalanx {

// When Python is to be told of a wait that begins then.
Clock::time_point slow_at(Clock::time_point beginning);
// Both with the GIL held. Both raise what comes out of Python.
void tell_slow(const WaitingCall& call);
// Some rank has refused a call: Python finds out whether this is the call that waits for it.
void tell_refused(const WaitingCall& call);

void bind_debug(nanobind::module_& module, nanobind::class_<GroupEnd>& group);

}  // namespace phalanx
