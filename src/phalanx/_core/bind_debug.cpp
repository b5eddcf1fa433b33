#include "bind_debug.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "bind_origin.hpp"
#include "listener.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

struct Slow {
  std::chrono::nanoseconds after = std::chrono::nanoseconds::max();
  nb::object tell;
};

// Never destroyed: threads may wait until the process ends.
Slow& slow() {
  static auto* const made = new Slow;
  return *made;
}

nb::tuple sizes_of(const Shape& shape) {
  const std::size_t kept = std::min<std::size_t>(shape.num, kSizesKept);
  nb::list sizes;
  for (std::size_t i = 0; i < kept; ++i) sizes.append(shape.sizes[i]);
  return nb::make_tuple(shape.listed, static_cast<int>(shape.num), nb::tuple(sizes));
}

// A signature with all that a report says of it; transports/signatures.py takes it apart.
nb::object facts_of(const Descriptor& call, const char* where) {
  if (call.seq == 0) return nb::none();
  return nb::make_tuple(call.seq, static_cast<int>(call.op), static_cast<int>(call.reduce_op), call.root,
                        static_cast<int>(call.dtype), call.count, call.layout, call.result, sizes_of(call.shape), where,
                        static_cast<int>(call.flags));
}

nb::list testimonies(Group& group) {
  nb::list all;
  for (int rank = 0; rank < group.size(); ++rank) {
    const Testimony& found = group.segment().testimony(rank);
    const Descriptor none{};
    all.append(nb::make_tuple(facts_of(found.arrived != 0 ? found.call : none, found.call_where),
                              facts_of(found.completed, found.completed_where)));
  }
  return all;
}

nb::object take_note(Group& group) {
  const std::optional<ShapeNote> note = group.take_note();
  if (!note) return nb::none();
  nb::list sides;
  for (const ShapeNote::Side& side : note->sides) {
    sides.append(nb::make_tuple(side.rank, sizes_of(side.shape), side.where));
  }
  return nb::make_tuple(note->seq, static_cast<int>(note->op), sides);
}

nb::object next_question() {
  std::optional<Listener::Call> call;
  {
    nb::gil_scoped_release without;
    call = listener().next();
  }
  if (!call) return nb::none();
  return nb::make_tuple(call->asked, call->noted);
}

std::optional<std::string> ask_rank(Group& group, int rank, double seconds) {
  if (rank < 0 || rank >= group.size()) throw std::invalid_argument("no such rank");
  nb::gil_scoped_release without;
  return ask(group.segment(), rank, std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9)));
}

std::uint64_t begin(BlackBox& box, std::uint32_t group, int op, int reduce_op, int peer, int dtype, std::int64_t count,
                    std::uint32_t tag, std::uint64_t bytes_in, std::uint64_t bytes_out, double timeout, bool async,
                    nb::handle sizes) {
  const Shape shape = shape_of(sizes, count);
  BoxCall call;
  call.group = group;
  call.op = static_cast<Op>(op);
  call.reduce_op = reduce_op;
  call.peer = peer;
  call.dtype = dtype;
  call.count = count;
  call.tag = tag;
  call.bytes_in = bytes_in;
  call.bytes_out = bytes_out;
  call.timeout = timeout;
  call.created = box_clock();
  call.origin = origin_of_call();
  call.origin.flags |= async ? kAsync : 0;
  call.shape = &shape;
  return box.begin(call).id();
}

}  // namespace

Clock::time_point slow_at() {
  const auto now = Clock::now();
  const auto after = slow().after;
  return after > Clock::time_point::max() - now ? Clock::time_point::max() : now + after;
}

void tell_slow(std::uint64_t token, Op op, std::uint64_t seq, const std::vector<int>& missing) {
  if (slow().tell.is_valid() && !slow().tell.is_none()) slow().tell(token, static_cast<int>(op), seq, missing);
}

void bind_debug(nb::module_& module, nb::class_<Group>& group) {
  nb::class_<BlackBox>(module, "BlackBox")
      .def(nb::init<const std::string&, std::uint32_t, int, int, const std::string&>())
      .def("remember", &BlackBox::remember)
      .def("begin", &begin)
      .def("number", [](BlackBox& box, std::uint64_t id, std::uint64_t seq) { box.entry(id).number(seq); })
      .def("start", [](BlackBox& box, std::uint64_t id) { box.entry(id).start(); })
      .def("end", [](BlackBox& box, std::uint64_t id, bool well) { box.entry(id).end(well); })
      .def("set_rank", &BlackBox::set_rank)
      .def("set_ending", [](BlackBox& box, int ending) { box.set_ending(static_cast<BoxEnding>(ending)); })
      .def("contents", [](const BlackBox& box) {
        const std::string contents = box.contents();
        return nb::bytes(contents.data(), contents.size());
      });

  group.def("keep_records", &Group::keep_records)
      .def("testimonies", &testimonies)
      .def("take_note", &take_note)
      .def("ask", &ask_rank)
      .def_prop_ro("was_told",
                   [](Group& self) {
                     return self.segment().control(self.rank()).gave_up.load(std::memory_order_relaxed) != 0;
                   })
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

  module.def("next_question", &next_question);
  module.def("answer", [](const std::string& text) {
    nb::gil_scoped_release without;
    listener().answer(text);
  });
  module.def("close_listener", [](bool closed) { listener().set_closed(closed); });
  module.def("set_slow", [](double seconds, nb::object tell) {
    slow().after = seconds > 0 ? std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, 1e9) * 1e9))
                               : std::chrono::nanoseconds::max();
    slow().tell = std::move(tell);
  }, nb::arg("seconds"), nb::arg("tell").none());
  bind_origin(module);
}

}  // namespace phalanx
