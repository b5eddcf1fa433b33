#include "bind_waits.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "gil.hpp"
#include "long_waits.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

// Never destroyed: threads may wait until the process ends.
nb::object& on_long_wait() {
  static auto* const made = new nb::object;
  return *made;
}

std::int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

// All of the group; none where one of its lanes is busy all the time.
std::optional<std::vector<PendingCall>> pending_calls(GroupEnd& group, double seconds) {
  if (group.forked()) return std::vector<PendingCall>();
  const WithoutGil without;
  const auto until = Clock::now() + std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
  auto calls = group.calls().look(until);
  if (!calls) return std::nullopt;
  const auto messages = group.messages().look(until);
  if (!messages) return std::nullopt;
  calls->insert(calls->end(), messages->begin(), messages->end());
  return calls;
}

}  // namespace

void tell_long() {
  if (on_long_wait().is_valid() && !on_long_wait().is_none()) call_python([] { on_long_wait()(); });
}

void bind_waits(nb::module_& module, nb::class_<GroupEnd>& group) {
  nb::class_<WaitingThread>(module, "WaitingThread")
      .def_ro("id", &WaitingThread::id)
      .def_ro("thread", &WaitingThread::thread)
      .def_ro("group", &WaitingThread::group)
      .def_prop_ro("op", [](const WaitingThread& self) { return std::string(traits_of(self.op).name); })
      .def_ro("seq", &WaitingThread::seq)
      .def_ro("peer", &WaitingThread::peer)
      .def_ro("tag", &WaitingThread::tag)
      .def_ro("is_bounded", &WaitingThread::is_bounded)
      .def_prop_ro("since_ns", [](const WaitingThread& self) { return nanoseconds(self.since); })
      .def_ro("where", &WaitingThread::where);
  nb::class_<PendingCall>(module, "PendingCall")
      .def_prop_ro("op", [](const PendingCall& self) { return std::string(traits_of(self.op).name); })
      .def_ro("seq", &PendingCall::seq)
      .def_ro("peer", &PendingCall::peer)
      .def_ro("tag", &PendingCall::tag)
      .def_ro("is_matched", &PendingCall::is_matched)
      .def_ro("missing", &PendingCall::missing)
      .def_ro("where", &PendingCall::where);
  module.def("long_waits", [] { return long_waits().all(); }, "The waits of threads of this process that last long.");
  module.def(
      "set_long",
      [](nb::object tell, double seconds) {
        on_long_wait() = std::move(tell);
        LongWaits::set_threshold(
            std::chrono::nanoseconds(static_cast<std::int64_t>(std::clamp(seconds, 0.0, 1e9) * 1e9)));
      },
      "tell"_a.none(), "seconds"_a = 1.0,
      nb::sig("def set_long(tell: collections.abc.Callable[[], None] | None, seconds: float = 1.0) -> None"),
      "Calls it whenever a wait has become one of `long_waits()`, after so many seconds.");
  group.def("pending_calls", &pending_calls, "seconds"_a,
            "Carries out what can be carried out now, and returns what is left: the first collective and all "
            "messages. None where a lane is busy for all of this time.");
}

}  // namespace phalanx
