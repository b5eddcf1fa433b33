#include "front_quick.hpp"

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "front_calls.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

struct Names {
  PyObject* front = PyUnicode_InternFromString("_front");
  PyObject* profiles = PyUnicode_InternFromString("_is_profiler_enabled");
};

const Names& names() {
  static const auto* const made = new Names;
  return *made;
}

// What a call is worked out in: used again by the thread's next call, so that it need not be allocated. A call that
// begins within another one, in a finalizer or a signal handler, gets its own.
class Scratch {
 public:
  struct Space {
    std::vector<nb::object> held;
    Arranged arranged;
    Memory memory;
  };

  Scratch() : mine_(std::move(spare())) {
    if (!mine_) mine_ = std::make_unique<Space>();
  }
  ~Scratch() {
    mine_->arranged.clear();
    mine_->memory.clear();
    // Last: what goes may make calls.
    mine_->held.clear();
    spare() = std::move(mine_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Space* operator->() const noexcept { return mine_.get(); }

 private:
  static std::unique_ptr<Space>& spare() {
    thread_local std::unique_ptr<Space> made;
    return made;
  }
  std::unique_ptr<Space> mine_;
};

nb::object attribute(PyObject* object, PyObject* name) {
  nb::object found = nb::steal(PyObject_GetAttr(object, name));
  if (found.is_valid()) return found;
  // A group that was not made: the Python method says so.
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw nb::python_error();
  PyErr_Clear();
  throw NotPlain{};
}

// The quick way knows no modes and no profiler.
void check_unwatched() {
  PyObject* profiles = PyDict_GetItemWithError(hooks().profiler.ptr(), names().profiles);
  if (profiles != Py_False) throw NotPlain{};
  const nb::object modes = nb::steal(PyObject_CallNoArgs(hooks().num_modes.ptr()));
  if (!modes.is_valid()) throw nb::python_error();
  if (PyLong_AsLong(modes.ptr()) != 0) throw NotPlain{};
}

// One call of a method, as far as the quick way knows it.
class QuickCall {
 public:
  QuickCall(const Method& method, PyObject* self, PyObject* const* args, Py_ssize_t num, PyObject* keywords)
      : self_(self), spelled_(method, args, num, keywords) {}

  // A new reference. Throws NotPlain, or a Python exception.
  nb::object carry_out();

 private:
  nb::object carry_out_collective();
  nb::object carry_out_message();
  void read_front();
  nb::list results_of(const Arranged& arranged) const;
  [[noreturn]] void fail(const Description& call, Result result, std::uint64_t seq) const;

  PyObject* const self_;
  SpelledCall spelled_;
  nb::object front_object_;
  Front* front_ = nullptr;
  nb::object group_object_;  // another thread may leave the group meanwhile
  GroupEnd* group_ = nullptr;
  double timeout_ = 0;
};

void QuickCall::read_front() {
  front_object_ = attribute(self_, names().front);
  if (!nb::isinstance<Front>(front_object_)) throw NotPlain{};
  front_ = nb::inst_ptr<Front>(front_object_);
  if (front_->group == nullptr || front_->copies != 0 || front_->coalescing) throw NotPlain{};
  timeout_ = front_->timeout;
  group_object_ = front_->object;
  group_ = front_->group;
}

nb::list QuickCall::results_of(const Arranged& arranged) const {
  nb::list results;
  const Spelling spelling = spelled_.method().spelling;
  const bool in_place = spelling == Spelling::tensor || spelling == Spelling::tensors;
  const Side& side = in_place && arranged.out.cut == Cut::nothing ? arranged.in : arranged.out;
  for (const TensorView& tensor : side.tensors) results.append(nb::handle(tensor.object));
  return results;
}

void QuickCall::fail(const Description& call, Result result, std::uint64_t seq) const {
  const std::string_view op = traits_of(call.op).name;
  const nb::object error = hooks().explain(nb::handle(self_), group_object_, nb::str(op.data(), op.size()),
                                           static_cast<int>(result), seq, timeout_);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

nb::object QuickCall::carry_out() {
  read_front();
  check_unwatched();
  spelled_.read();
  if (spelled_.timeout) timeout_ = *spelled_.timeout;
  return spelled_.is_message() ? carry_out_message() : carry_out_collective();
}

nb::object QuickCall::carry_out_collective() {
  GroupEnd& group = *group_;
  const Scratch scratch;
  TensorReader reader(Unknown::refuse, scratch->held);
  Arranged& arranged = scratch->arranged;
  Memory& memory = scratch->memory;
  arrange(*spelled_.method().form, spelled_.arguments, group.rank(), group.size(), reader, arranged);
  if (memory.take(arranged, group.rank(), group.size()) != Obstacle::none) throw NotPlain{};
  if (!spelled_.is_async) {
    const auto ticket = ticket_of_thread();
    memory.fill(ticket->request, arranged, group.size());
    const Outcome outcome = run_call(group, ticket, timeout_);
    if (outcome.result != Result::finished) fail(arranged.call, outcome.result, outcome.seq);
    if (spelled_.returns_shared) return hooks().done;
    return hooks().finished(results_of(arranged));
  }
  auto ticket = std::make_shared<CallTicket>();
  memory.fill(ticket->request, arranged, group.size());
  const nb::list results = results_of(arranged);
  const Started started = start_call(group, std::move(ticket), timeout_, memory.keep());
  if (started.result != Result::finished && started.result != Result::pending) fail(arranged.call, started.result, 0);
  const std::string_view op = traits_of(arranged.call.op).name;
  nb::list written;
  if (started.pending.is_valid()) {
    for (const Piece& piece : memory.written()) {
      const auto from = reinterpret_cast<std::uint64_t>(piece.data);
      written.append(nb::make_tuple(from, from + piece.size));
    }
  }
  return hooks().started(nb::handle(self_), group_object_, nb::str(op.data(), op.size()), results,
                         started.pending.is_valid() ? started.pending : nb::none(), written, timeout_);
}

nb::object QuickCall::carry_out_message() {
  const bool is_from_any = spelled_.method().spelling == Spelling::recv_any;
  const std::int64_t peer = spelled_.peer;
  GroupEnd& group = *group_;
  const bool is_peer = is_from_any ? group.size() > 1 : peer >= 0 && peer < group.size();
  if (!is_peer) throw NotPlain{};
  const Scratch scratch;
  TensorReader reader(Unknown::refuse, scratch->held);
  const TensorView view = reader.read(spelled_.tensor.ptr(), "tensor");
  if (!is_plain(view)) throw NotPlain{};
  const bool sends = spelled_.method().spelling == Spelling::send;
  auto ticket = message_of(view, sends, static_cast<int>(peer), static_cast<std::uint32_t>(spelled_.tag));
  const Description call = ticket->call;
  const Started started = start_message(group, std::move(ticket), timeout_, storage_of(view));
  // Refused before it was made: the Python method explains it.
  if (started.result == Result::not_writable) throw NotPlain{};
  if (started.result != Result::finished && started.result != Result::pending) fail(call, started.result, 0);
  // The work of a send that has ended, from a list as torch passes it, is shared and has no result.
  if (sends && spelled_.is_async && !started.pending.is_valid() && spelled_.is_listed) return hooks().done;
  const std::string_view op = traits_of(call.op).name;
  nb::object work = hooks().messaged(nb::handle(self_), group_object_, nb::str(op.data(), op.size()), spelled_.tensor,
                                     started.pending.is_valid() ? started.pending : nb::none(), peer, timeout_);
  if (!spelled_.is_async) work.attr("wait")();
  return work;
}

}  // namespace

Hooks& hooks() {
  static auto* const made = new Hooks;
  return *made;
}

nb::object carry_out_plain(const Method& method, PyObject* self, PyObject* const* args, Py_ssize_t num,
                           PyObject* keywords) {
  return QuickCall(method, self, args, num, keywords).carry_out();
}

}  // namespace phalanx
