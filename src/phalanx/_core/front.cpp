#include "front.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "front_calls.hpp"
#include "front_describe.hpp"
#include "front_method.hpp"
#include "front_options.hpp"
#include "front_quick.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

// For Python: what a normalised call is made of.
Side side_of(nb::handle blocks, TensorReader& reader, const char* name) {
  Side side;
  if (blocks.is_none()) return side;
  const nb::object tensors = blocks.attr("tensors"), sizes = blocks.attr("sizes");
  for (Py_ssize_t i = 0; i < static_cast<Py_ssize_t>(nb::len(tensors)); ++i) {
    side.tensors.push_back(reader.read(nb::object(tensors[i]).ptr(), name, i));
  }
  side.cut = Cut::whole;
  if (!sizes.is_none()) {
    side.cut = Cut::sized;
    side.sizes = nb::cast<std::vector<std::int64_t>>(sizes);
  } else if (nb::cast<bool>(blocks.attr("listed"))) {
    side.cut = Cut::listed;
  } else if (nb::cast<int>(blocks.attr("num")) != 1) {
    side.cut = Cut::evenly;
  }
  return side;
}

// What became of a call, for Python: done, or why not.
struct Handed {
  Obstacle obstacle = Obstacle::none;
  Result result = Result::finished;
  std::uint64_t seq = 0;
  nb::object pending = nb::none();
  std::vector<Piece> written;
};

// What the core takes for granted. Users never see these errors: the forms check and explain before.
void check_call(const GroupEnd& group, const Description& call) {
  const OpTraits& traits = traits_of(call.op);
  if (traits.is_message) throw std::invalid_argument("not a collective");
  if (traits.reduces && kernel_of(static_cast<int>(call.dtype), call.reduce_op) == nullptr) {
    throw std::invalid_argument("no kernel for this dtype and reduce op");
  }
  if (traits.rooted && (call.root < 0 || call.root >= group.size())) {
    throw std::invalid_argument("root is not a rank of the group");
  }
}

Arranged arranged_of(const Description& call, nb::handle inputs, nb::handle outputs, TensorReader& reader) {
  Arranged arranged;
  arranged.call = call;
  arranged.in = side_of(inputs, reader, "inputs");
  arranged.writes_input = !outputs.is_none() && traits_of(call.op).in_place;
  if (!arranged.writes_input) arranged.out = side_of(outputs, reader, "outputs");
  return arranged;
}

// A call that Python has normalised, with its memory.
struct Normalised {
  Normalised(const GroupEnd& group, const Description& call, nb::handle inputs, nb::handle outputs) {
    check_call(group, call);
    arranged = arranged_of(call, inputs, outputs, reader);
    obstacle = memory.take(arranged, group.rank(), group.size());
  }
  std::vector<nb::object> held;
  TensorReader reader{Unknown::look_closer, held};
  Arranged arranged;
  Memory memory;
  Obstacle obstacle;
};

Handed run(GroupEnd& group, const Description& call, nb::handle inputs, nb::handle outputs, double timeout) {
  const Normalised made(group, call, inputs, outputs);
  if (made.obstacle != Obstacle::none) return {made.obstacle};
  const auto ticket = ticket_of_thread();
  made.memory.fill(ticket->request, made.arranged, group.size());
  const Outcome outcome = run_call(group, ticket, timeout);
  return {Obstacle::none, outcome.result, outcome.seq};
}

Handed start(GroupEnd& group, const Description& call, nb::handle inputs, nb::handle outputs, double timeout) {
  const Normalised made(group, call, inputs, outputs);
  if (made.obstacle != Obstacle::none) return {made.obstacle};
  auto ticket = std::make_shared<CallTicket>();
  made.memory.fill(ticket->request, made.arranged, group.size());
  Started started = start_call(group, std::move(ticket), timeout, made.memory.keep());
  Handed handed{Obstacle::none, started.result, 0};
  if (started.pending.is_valid()) handed.pending = std::move(started.pending);
  handed.written = made.memory.written();
  return handed;
}

// `tensor` lies in plain memory.
Handed message(GroupEnd& group, bool sends, nb::handle tensor, int peer, std::int64_t tag, double timeout) {
  if (peer >= group.size() || (peer < 0 && (sends || peer != kAnySource)) || tag < 0 || tag > INT32_MAX) {
    throw std::invalid_argument("not a peer of the group, or not a tag");
  }
  std::vector<nb::object> held;
  TensorReader reader(Unknown::look_closer, held);
  const TensorView view = reader.read(tensor.ptr(), "tensor");
  Handed handed;
  if (view.data == nullptr && view.numel > 0) {
    handed.obstacle = Obstacle::no_memory;
    return handed;
  }
  Started started =
      start_message(group, message_of(view, sends, peer, static_cast<std::uint32_t>(tag)), timeout, storage_of(view));
  handed.result = started.result;
  if (started.pending.is_valid()) handed.pending = std::move(started.pending);
  return handed;
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges_of(const Handed& handed) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  for (const Piece& piece : handed.written) {
    const auto from = reinterpret_cast<std::uint64_t>(piece.data);
    ranges.emplace_back(from, from + piece.size);
  }
  return ranges;
}

// The description of a call whose arguments are right, or the problem.
nb::object describe_call(Form form, int rank, int size, nb::object output, nb::object input, int reduce_op,
                         double factor, std::int64_t root, std::vector<std::int64_t> output_splits,
                         std::vector<std::int64_t> input_splits) {
  Arguments arguments{output, input, reduce_op, factor, root, std::move(output_splits), std::move(input_splits)};
  std::vector<nb::object> held;
  TensorReader reader(Unknown::look_closer, held);
  try {
    Arranged made;
    arrange(form, arguments, rank, size, reader, made);
    return nb::cast(made.call);
  } catch (Problem& problem) {
    return nb::cast(std::move(problem));
  }
}

// None where the list of tensors is right, or the problem.
nb::object check_tensors(const std::string& name, nb::object tensors, std::int64_t num) {
  std::vector<nb::object> held;
  TensorReader reader(Unknown::look_closer, held);
  try {
    Views found;
    read_several(reader, found, tensors, name.c_str(), false, num);
    return nb::none();
  } catch (Problem& problem) {
    return nb::cast(std::move(problem));
  }
}

// The number of elements of a tensor that is right, or the problem.
nb::object check_tensor(const std::string& name, nb::object tensor, bool written) {
  std::vector<nb::object> held;
  TensorReader reader(Unknown::look_closer, held);
  try {
    return nb::int_(read_one(reader, tensor, name.c_str(), -1, written).numel);
  } catch (Problem& problem) {
    return nb::cast(std::move(problem));
  }
}

}  // namespace

void bind_front(nb::module_& module) {
  bind_options(module);
  bind_tensors(module);
  bind_checks(module);
  bind_forms(module);
  nb::enum_<Obstacle>(module, "Obstacle", "Why a call can't be handed over as it is.")
      .value("none", Obstacle::none)
      .value("not_plain", Obstacle::not_plain)
      .value("overlap", Obstacle::overlap)
      .value("not_writable", Obstacle::not_writable)
      .value("no_memory", Obstacle::no_memory);
  nb::class_<Handed>(module, "Handed", "What became of a call that was to be handed over.")
      .def_ro("obstacle", &Handed::obstacle)
      .def_prop_ro("result", [](const Handed& self) { return static_cast<int>(self.result); })
      .def_ro("seq", &Handed::seq)
      .def_prop_ro(
          "pending", [](const Handed& self) { return self.pending; }, nb::sig("def pending(self) -> CallHandle | None"))
      .def_prop_ro("written", &ranges_of, "The addresses, from and to, of the memory that the core writes.");
  module.def(
      "describe_call", &describe_call, "form"_a, "rank"_a, "size"_a, nb::kw_only(), "output"_a.none() = nb::none(),
      "source"_a.none() = nb::none(), "reduce_op"_a = static_cast<int>(kNoReduceOp), "factor"_a = 1.0,
      "root"_a = kNoRank, "output_splits"_a = std::vector<std::int64_t>(),
      "input_splits"_a = std::vector<std::int64_t>(),
      nb::sig("def describe_call(form: Form, rank: int, size: int, *, output: object = None, source: object = None, "
              "reduce_op: int = -1, factor: float = 1.0, root: int = -1, "
              "output_splits: collections.abc.Sequence[int] = (), "
              "input_splits: collections.abc.Sequence[int] = ()) -> Description | Problem"));
  module.def("check_tensor", &check_tensor, "name"_a, "tensor"_a.none(), "written"_a,
             nb::sig("def check_tensor(name: str, tensor: object, written: bool) -> int | Problem"));
  module.def("check_tensors", &check_tensors, "name"_a, "tensors"_a.none(), "num"_a,
             nb::sig("def check_tensors(name: str, tensors: object, num: int) -> Problem | None"));
  module.def("run_call", &run, "group"_a, "call"_a, "inputs"_a.none(), "outputs"_a.none(), "timeout"_a,
             "Carries out a call whose tensors lie in plain memory.");
  module.def("start_call", &start, "group"_a, "call"_a, "inputs"_a.none(), "outputs"_a.none(), "timeout"_a,
             "Begins a call whose tensors lie in plain memory.");
  module.def("start_message", &message, "group"_a, "sends"_a, "tensor"_a, "peer"_a, "tag"_a, "timeout"_a,
             "Begins a message whose tensor lies in plain memory.");
  bind_front_method(module);
  bind_front_describe(module);
}

}  // namespace phalanx
