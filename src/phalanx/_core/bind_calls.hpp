// The calls of a group, for Python: the engine of calling.hpp with Python's GIL, signals and objects.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "calling.hpp"

namespace phalanx {

void bind_calls(nanobind::module_& module, nanobind::class_<GroupEnd>& group);

// A call that was begun, or could not be. While it is `pending`, the object is what Python waits with.
struct Started {
  Result result;
  nanobind::object pending;
};

// With the GIL held, which is given up while the core moves bytes or waits. The ticket has its request, or its message;
// everything else is set here. `kept` is what keeps the memory of the call until the call has ended.
Outcome run_call(GroupEnd& group, const std::shared_ptr<CallTicket>& ticket, double timeout);
Started start_call(GroupEnd& group, std::shared_ptr<CallTicket> ticket, double timeout, nanobind::object kept);
Started start_message(GroupEnd& group, std::shared_ptr<MessageTicket> ticket, double timeout, nanobind::object kept);

// The kernel for numbers from Python, which may be anything; nullptr where there is none.
ReduceFn kernel_of(int dtype, int op);

}  // namespace phalanx
