#include "bind_debug.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <stdexcept>

#include "bind_origin.hpp"
#include "exit_status.hpp"
#include "gil.hpp"
#include "listener.hpp"
#include "peer_watch.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

struct Slow {
  std::chrono::nanoseconds after = std::chrono::nanoseconds::max();
  nb::object tell;
  nb::object tell_refused;
};

// Never destroyed: threads may wait until the process ends.
Slow& slow() {
  static auto* const made = new Slow;
  return *made;
}

nb::object next_question() {
  std::optional<Listener::News> news;
  {
    const WithoutGil without;
    news = listener().next();
  }
  if (!news) return nb::none();
  return nb::make_tuple(news->asked, news->noted);
}

void ask_rank(GroupEnd& group, int rank) {
  if (rank < 0 || rank >= group.size()) throw std::invalid_argument("no such rank");
  ask(group.segment(), group.segment().seat_of(rank));
}

std::optional<std::string> answer_of_rank(GroupEnd& group, int rank, double seconds) {
  if (rank < 0 || rank >= group.size()) throw std::invalid_argument("no such rank");
  const WithoutGil without;
  const Seat seat = group.segment().seat_of(rank);
  return answer_of(group.segment(), seat, std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9)));
}

void refuse_message(GroupEnd& group, bool sends, int peer, std::int64_t tag, const std::string& text) {
  group.refusals().refuse_message(sends, peer, tag, text);
}

std::vector<std::string> refusals_of(GroupEnd& group, int rank) {
  if (rank < 0 || rank >= group.size()) throw std::invalid_argument("no such rank");
  return group.refusals().open_of(rank);
}

}  // namespace

Clock::time_point slow_at(Clock::time_point beginning) {
  const auto after = slow().after;
  return after > Clock::time_point::max() - beginning ? Clock::time_point::max() : beginning + after;
}

void tell_slow(const WaitingCall& call) {
  if (!slow().tell.is_valid() || slow().tell.is_none()) return;
  call_python([&] { slow().tell(call.group, static_cast<int>(call.op), call.seq, call.missing); });
}

void tell_refused(const WaitingCall& call) {
  if (!slow().tell_refused.is_valid() || slow().tell_refused.is_none()) return;
  call_python([&] { slow().tell_refused(call.group, static_cast<int>(call.op), call.seq, call.tag, call.missing); });
}

void bind_debug(nb::module_& module, nb::class_<GroupEnd>& group) {
  group.def_prop_ro("identity", [](GroupEnd& self) { return self.forked() ? "" : self.member().identity(); })
      .def("testimonies", [](const GroupEnd& self) { return self.member().testimonies(); })
      .def("take_note", &GroupEnd::take_note)
      .def(
          "refuse_call", [](GroupEnd& self, const std::string& text) { self.refusals().refuse_call(text); }, "text"_a)
      .def("refuse_message", &refuse_message, "sends"_a, "peer"_a, "tag"_a, "text"_a)
      .def("refusals", &refusals_of, "rank"_a)
      .def("ask", &ask_rank, "rank"_a)
      .def("answer_of", &answer_of_rank, "rank"_a, "seconds"_a)
      .def_prop_ro("was_told",
                   [](GroupEnd& self) {
                     return self.segment().control(self.member().seat()).gave_up.load(std::memory_order_relaxed) != 0;
                   })
      .def(
          "has_left",
          [](GroupEnd& self, int rank) {
            if (rank < 0 || rank >= self.size()) throw std::invalid_argument("no such rank");
            return self.member().lines.leaving(rank) != Leaving::no;
          },
          "rank"_a)
      .def(
          "box_of",
          [](GroupEnd& self, int rank) {
            if (rank < 0 || rank >= self.size()) throw std::invalid_argument("no such rank");
            return self.segment().answer(self.segment().seat_of(rank)).box.read();
          },
          "rank"_a)
      .def_prop_ro(
          "level",
          [](GroupEnd& self) { return self.forked() ? 0 : static_cast<int>(self.segment().header().tuning.check); })
      .def_rw("token", &GroupEnd::token);

  module.def("look_for_deaths", [] {
    const WithoutGil without;
    peer_watch().look();
  });
  module.def("begin_making", [] { peer_watch().begin_making(); });
  module.def("end_making", [] {
    const WithoutGil without;
    peer_watch().end_making();
  });
  module.def("next_question", &next_question, nb::sig("def next_question() -> tuple[bool, bool] | None"),
             "Whether somebody asks where this rank is, and whether there is a note to be told; None: the listener is "
             "closed.");
  module.def(
      "answer",
      [](const std::string& text) {
        const WithoutGil without;
        listener().answer(text);
      },
      "text"_a);
  module.def("close_listener", [](bool closed) { listener().set_closed(closed); }, "closed"_a);
  module.def(
      "set_slow",
      [](double seconds, nb::object tell, nb::object tell_refused) {
        slow().after = seconds > 0 ? std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, 1e9) * 1e9))
                                   : std::chrono::nanoseconds::max();
        slow().tell = std::move(tell);
        slow().tell_refused = std::move(tell_refused);
      },
      "seconds"_a, "tell"_a.none(), "tell_refused"_a.none() = nb::none(),
      nb::sig("def set_slow(seconds: float, tell: collections.abc.Callable[[int, int, int, list[int]], None] | None, "
              "tell_refused: "
              "collections.abc.Callable[[int, int, int, int, list[int]], None] | None = None) -> None"));
  bind_origin(module);
}

}  // namespace phalanx
