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

// The same on all ranks of the group, and on those of no other group.
std::string identity_of(Group& group) {
  constexpr std::size_t kBytes = 8;
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < kBytes; ++i) {
    const std::uint8_t byte = group.segment().header().nonce[i];
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

// One of each rank.
std::vector<Testimony> testimonies(Group& group) {
  std::vector<Testimony> all;
  const std::uint32_t report = group.member().lines.report();
  for (int rank = 0; rank < group.size(); ++rank) all.push_back(group.segment().testimony(report, rank));
  return all;
}

nb::object next_question() {
  std::optional<Listener::Call> call;
  {
    const WithoutGil without;
    call = listener().next();
  }
  if (!call) return nb::none();
  return nb::make_tuple(call->asked, call->noted);
}

void ask_rank(Group& group, int rank) {
  if (rank < 0 || rank >= group.size()) throw std::invalid_argument("no such rank");
  ask(group.segment(), rank);
}

std::optional<std::string> answer_of_rank(Group& group, int rank, double seconds) {
  if (rank < 0 || rank >= group.size()) throw std::invalid_argument("no such rank");
  const WithoutGil without;
  return answer_of(group.segment(), rank, std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9)));
}

void refuse_message(Group& group, bool sends, int peer, std::int64_t tag, const std::string& text) {
  group.refusals().refuse_message(sends, peer, tag, text);
}

std::vector<std::string> refusals_of(Group& group, int rank) {
  if (rank < 0 || rank >= group.size()) throw std::invalid_argument("no such rank");
  return group.refusals().open_of(rank);
}

// What Python holds of a box. A shared_ptr<BlackBox> made from a Python object would take the GIL wherever the last
// copy goes, and that may be a thread for which the interpreter waits.
struct HeldBox {
  std::shared_ptr<BlackBox> box;
};

// A call of a rank that is a thread.
std::uint64_t begin(const HeldBox& held, std::uint32_t group, const Description& description, std::uint64_t bytes_in,
                    std::uint64_t bytes_out, double timeout, bool is_async) {
  if (held.box->forked()) return 0;
  BoxCall call;
  call.group = group;
  call.call = description;
  call.bytes_in = bytes_in;
  call.bytes_out = bytes_out;
  call.timeout = timeout;
  call.created = Clock::now();
  const Origin origin = origin_of_call();
  call.location = origin.location != nullptr ? held.box->offset_of(*origin.location) : 0;
  call.call.device = description.dtype != DType::none ? Device::cpu : Device::none;
  call.call.engine = Engine::threads;
  call.call.flags = origin.flags | (is_async ? kAsync : 0);
  return held.box->begin(call).id();
}

// Of a group.
std::uint64_t begin_making(const HeldBox& held, std::uint32_t group, double timeout) {
  Description description;
  description.op = static_cast<Op>(kMaking);
  return begin(held, group, description, 0, 0, timeout, false);
}

}  // namespace

Clock::time_point slow_at(Clock::time_point beginning) {
  const auto after = slow().after;
  return after > Clock::time_point::max() - beginning ? Clock::time_point::max() : beginning + after;
}

void tell_slow(std::uint64_t token, Op op, std::uint64_t seq, const std::vector<int>& missing) {
  if (!slow().tell.is_valid() || slow().tell.is_none()) return;
  call_python([&] { slow().tell(token, static_cast<int>(op), seq, missing); });
}

void tell_refused(std::uint64_t token, Op op, std::uint64_t seq, std::uint32_t tag, const std::vector<int>& missing) {
  if (!slow().tell_refused.is_valid() || slow().tell_refused.is_none()) return;
  call_python([&] { slow().tell_refused(token, static_cast<int>(op), seq, tag, missing); });
}

void bind_debug(nb::module_& module, nb::class_<Group>& group) {
  nb::class_<HeldBox>(module, "BlackBox")
      .def("__init__",
           [](HeldBox* self, int fd, std::uint32_t capacity, int rank, int world_size, const std::string& program) {
             new (self) HeldBox{std::make_shared<BlackBox>(fd, capacity, rank, world_size, program)};
           })
      .def("remember", [](const HeldBox& self, const std::string& text) { return self.box->remember(text); })
      .def("begin", &begin, nb::arg("group"), nb::arg("description"), nb::kw_only(), nb::arg("bytes_in"),
           nb::arg("bytes_out"), nb::arg("timeout"), nb::arg("is_async"))
      .def("begin_making", &begin_making, nb::arg("group"), nb::arg("timeout"))
      .def("number", [](const HeldBox& self, std::uint64_t id, std::uint64_t seq) { self.box->entry(id).number(seq); })
      .def("start", [](const HeldBox& self, std::uint64_t id) { self.box->entry(id).start(Clock::now()); })
      .def("end", [](const HeldBox& self, std::uint64_t id, bool well) { self.box->entry(id).end(well); })
      .def("blame",
           [](const HeldBox& self, std::uint64_t id, int kind, int rank) {
             Failure failure{};
             failure.kind = static_cast<FailureKind>(kind);
             failure.peer = failure.rank = rank;
             self.box->entry(id).blame(failure);
           })
      .def("set_rank", [](const HeldBox& self, int rank, int size) { self.box->set_rank(rank, size); })
      .def("say_end",
           [](const HeldBox& self, int how, const std::string& exception, std::int64_t ns) {
             self.box->say_end(static_cast<Ending>(how), exception, Clock::time_point(std::chrono::nanoseconds(ns)));
           })
      .def("watch_in_making",
           [](const HeldBox& self, std::int64_t pid, std::uint64_t start, std::uint64_t program, int job_rank,
              const std::string& folder) {
             const auto peer = Peer::watch({static_cast<pid_t>(pid), start, program});
             if (peer && !self.box->forked()) peer_watch().add_to_making(peer, job_rank, self.box, folder);
           })
      .def("tell_exit_status", [](const HeldBox& self) { tell_exit_status(self.box); })
      .def("move_to", [](const HeldBox& self, int fd) { self.box->move_to(fd); })
      .def("contents", [](const HeldBox& self) {
        const std::string contents = self.box->contents();
        return nb::bytes(contents.data(), contents.size());
      });

  group
      .def("keep_records", [](Group& self, const HeldBox& held, const std::string& name,
                              const std::string& path) { self.keep_records(held.box, name, path); })
      .def("watch_deaths", [](Group& self, const HeldBox& held, const std::vector<int>& job_ranks,
                              const std::string& folder) { self.watch_deaths(held.box, job_ranks, folder); })
      .def_prop_ro("identity", &identity_of)
      .def("testimonies", &testimonies)
      .def("take_note", &Group::take_note)
      .def("refuse_call", [](Group& self, const std::string& text) { self.refusals().refuse_call(text); })
      .def("refuse_message", &refuse_message)
      .def("refusals", &refusals_of)
      .def("ask", &ask_rank)
      .def("answer_of", &answer_of_rank)
      .def_prop_ro(
          "was_told",
          [](Group& self) { return self.segment().control(self.rank()).gave_up.load(std::memory_order_relaxed) != 0; })
      .def("has_left",
           [](Group& self, int rank) {
             if (rank < 0 || rank >= self.size()) throw std::invalid_argument("no such rank");
             return self.member().lines.leaving(rank) != Leaving::no;
           })
      .def("box_of",
           [](Group& self, int rank) {
             if (rank < 0 || rank >= self.size()) throw std::invalid_argument("no such rank");
             return self.segment().answer(rank).box.read();
           })
      .def_prop_ro("check", [](Group& self) { return static_cast<int>(self.segment().header().tuning.check); })
      .def_rw("token", &Group::token);

  module.def("look_for_deaths", [] {
    const WithoutGil without;
    peer_watch().look();
  });
  module.def("begin_making", [] { peer_watch().begin_making(); });
  module.def("end_making", [] {
    const WithoutGil without;
    peer_watch().end_making();
  });
  module.def("next_question", &next_question);
  module.def("answer", [](const std::string& text) {
    const WithoutGil without;
    listener().answer(text);
  });
  module.def("close_listener", [](bool closed) { listener().set_closed(closed); });
  module.def(
      "set_slow",
      [](double seconds, nb::object tell, nb::object tell_refused) {
        slow().after = seconds > 0 ? std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, 1e9) * 1e9))
                                   : std::chrono::nanoseconds::max();
        slow().tell = std::move(tell);
        slow().tell_refused = std::move(tell_refused);
      },
      nb::arg("seconds"), nb::arg("tell").none(), nb::arg("tell_refused").none() = nb::none());
  bind_origin(module);
}

}  // namespace phalanx
