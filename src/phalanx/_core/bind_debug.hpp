// What Python sees of a group in trouble: black boxes, questions between ranks, slow calls, testimonies.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "group.hpp"

namespace phalanx {

// When Python is to be told of a wait that begins then.
Clock::time_point slow_at(Clock::time_point beginning);
// Both with the GIL held. Both raise what comes out of Python.
void tell_slow(std::uint64_t token, Op op, std::uint64_t seq, const std::vector<int>& missing);
// Some rank has refused a call: Python finds out whether this is the call that waits for it. `tag` is that of a
// message.
void tell_refused(std::uint64_t token, Op op, std::uint64_t seq, std::uint32_t tag, const std::vector<int>& missing);

void bind_debug(nanobind::module_& module, nanobind::class_<Group>& group);

}  // namespace phalanx
