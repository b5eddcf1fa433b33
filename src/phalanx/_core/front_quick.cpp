#include "front_quick.hpp"

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "front_calls.hpp"
#include "front_options.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

constexpr Method kMethods[] = {
    {"barrier", Spelling::options, Form::barrier},
    {"all_reduce", Spelling::tensor, Form::all_reduce},
    {"all_reduce_coalesced", Spelling::tensors, Form::all_reduce_coalesced},
    {"reduce", Spelling::tensor, Form::reduce},
    {"broadcast", Spelling::tensor, Form::broadcast},
    {"all_gather", Spelling::outputs_tensor, Form::all_gather},
    {"all_gather_single", Spelling::output_input, Form::all_gather_single},
    {"all_gather_coalesced", Spelling::outputs_inputs, Form::all_gather_coalesced},
    {"all_gather_single_coalesced", Spelling::outputs_inputs, Form::all_gather_single_coalesced},
    {"gather", Spelling::outputs_tensor, Form::gather},
    {"scatter", Spelling::tensor_inputs, Form::scatter},
    {"reduce_scatter", Spelling::tensor_inputs, Form::reduce_scatter},
    {"reduce_scatter_single", Spelling::output_input, Form::reduce_scatter_single},
    {"reduce_scatter_single_coalesced", Spelling::outputs_inputs, Form::reduce_scatter_single_coalesced},
    {"all_to_all", Spelling::outputs_inputs, Form::all_to_all},
    {"all_to_all_single", Spelling::output_input_splits, Form::all_to_all_single},
    {"send", Spelling::send, std::nullopt},
    {"recv", Spelling::recv, std::nullopt},
    {"recv_anysource", Spelling::recv_any, std::nullopt},
};

struct Names {
  PyObject* front = PyUnicode_InternFromString("_front");
  PyObject* opts = PyUnicode_InternFromString("opts");
  PyObject* async_op = PyUnicode_InternFromString("async_op");
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

std::int64_t small_int(PyObject* number) {
  if (!PyLong_CheckExact(number)) throw NotPlain{};
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
  if (overflow != 0) throw NotPlain{};
  return value;
}

// The quick way knows no modes and no profiler.
void check_unwatched() {
  PyObject* profiles = PyDict_GetItemWithError(hooks().profiler.ptr(), names().profiles);
  if (profiles != Py_False) throw NotPlain{};
  const nb::object modes = nb::steal(PyObject_CallNoArgs(hooks().num_modes.ptr()));
  if (!modes.is_valid()) throw nb::python_error();
  if (small_int(modes.ptr()) != 0) throw NotPlain{};
}

// PREMUL_SUM has a factor, which Python reads.
int take_reduce_op(int number) {
  if (number < 0 || number >= static_cast<int>(ReduceOp::premul_sum)) throw NotPlain{};
  return number;
}

// One call of a method, as far as the quick way knows it.
class QuickCall {
 public:
  QuickCall(const Method& method, PyObject* self, PyObject* const* args, Py_ssize_t num, PyObject* keywords)
      : method_(method), self_(self), args_(args), num_(num), keywords_(keywords) {}

  // A new reference. Throws NotPlain, or a Python exception.
  nb::object carry_out();

 private:
  nb::object carry_out_collective();
  nb::object carry_out_message();
  void read_front();
  void read_keywords();
  void read_options(PyObject* options);
  void read_tensors();
  static nb::object one_of(PyObject* list);
  static nb::object inner_of(PyObject* list);
  std::vector<std::int64_t> splits_of(PyObject* list) const;
  nb::list results_of(const Arranged& arranged) const;
  [[noreturn]] void fail(const Description& call, Result result, std::uint64_t seq) const;

  const Method& method_;
  PyObject* const self_;
  PyObject* const* const args_;
  const Py_ssize_t num_;
  PyObject* const keywords_;
  nb::object front_object_;
  Front* front_ = nullptr;
  nb::object group_object_;  // another thread may leave the group meanwhile
  GroupEnd* group_ = nullptr;
  PyObject* options_ = nullptr;
  // What a call is given is kept for its time: others may change the lists that it comes in.
  nb::object output_, input_;
  Arguments arguments_;
  double timeout_ = 0;
  bool is_async_ = true;
  bool returns_shared_ = false;  // torch drops the work of a call whose options say that it is synchronous
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

void QuickCall::read_keywords() {
  const Py_ssize_t num = keywords_ == nullptr ? 0 : PyTuple_GET_SIZE(keywords_);
  for (Py_ssize_t i = 0; i < num; ++i) {
    PyObject* name = PyTuple_GET_ITEM(keywords_, i);
    PyObject* value = args_[num_ + i];
    if (name == names().opts) {
      options_ = value;
    } else if (name == names().async_op && PyBool_Check(value)) {
      is_async_ = value == Py_True;
    } else {
      throw NotPlain{};
    }
  }
}

void QuickCall::read_options(PyObject* options) {
  const OpTraits& traits = traits_of(op_of(*method_.form));
  const bool has_root_tensor = traits.rooted && method_.spelling == Spelling::tensor;
  CallOptions found{};
  if (!phalanx::read_options(options, {traits.reduces, traits.rooted, has_root_tensor}, found)) {
    // group.all_reduce(tensor, ReduceOp.MAX)
    if (method_.form != Form::all_reduce) throw NotPlain{};
    arguments_.reduce_op = take_reduce_op(reduce_op_of(options));
    return;
  }
  if (is_async_) {
    is_async_ = found.is_async;
    returns_shared_ = !is_async_;
  }
  constexpr std::int64_t kNotGiven = -1, kMostMilliseconds = 1'000'000'000'000;
  if (found.timeout_ms != kNotGiven) {
    if (found.timeout_ms <= 0 || found.timeout_ms > kMostMilliseconds) throw NotPlain{};
    timeout_ = static_cast<double>(found.timeout_ms) / 1000;
  }
  if (traits.reduces) arguments_.reduce_op = take_reduce_op(found.reduce_op);
  if (traits.rooted) arguments_.root = found.root;
  if (has_root_tensor && found.root_tensor != 0) throw NotPlain{};
}

// The one tensor of a call: torch passes it in a list.
nb::object QuickCall::one_of(PyObject* list) {
  if (!PyList_CheckExact(list)) return nb::borrow(list);
  if (PyList_GET_SIZE(list) != 1) throw NotPlain{};
  return nb::borrow(PyList_GET_ITEM(list, 0));
}

// The one list of tensors of a call: torch passes it in another list.
nb::object QuickCall::inner_of(PyObject* list) {
  if (!PyList_CheckExact(list)) throw NotPlain{};
  if (PyList_GET_SIZE(list) == 0 || !PyList_CheckExact(PyList_GET_ITEM(list, 0))) return nb::borrow(list);
  if (PyList_GET_SIZE(list) != 1) throw NotPlain{};
  return nb::borrow(PyList_GET_ITEM(list, 0));
}

std::vector<std::int64_t> QuickCall::splits_of(PyObject* list) const {
  std::vector<std::int64_t> splits;
  if (list == Py_None) return splits;
  if (!PyList_CheckExact(list)) throw NotPlain{};
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) splits.push_back(small_int(PyList_GET_ITEM(list, i)));
  return splits;
}

// How many arguments come before the options.
constexpr Py_ssize_t num_before_options(Spelling spelling) noexcept {
  switch (spelling) {
    case Spelling::options:
      return 0;
    case Spelling::tensor:
    case Spelling::tensors:
      return 1;
    case Spelling::output_input_splits:
      return 4;
    default:
      return 2;
  }
}

void QuickCall::read_tensors() {
  const Py_ssize_t num = num_before_options(method_.spelling);
  if (num_ < num || num_ > num + 1 || (num_ == num + 1 && options_ != nullptr)) throw NotPlain{};
  switch (method_.spelling) {
    case Spelling::tensor:
      output_ = one_of(args_[0]);
      break;
    case Spelling::tensors:
      output_ = nb::borrow(args_[0]);
      break;
    case Spelling::outputs_tensor:
      output_ = inner_of(args_[0]);
      input_ = one_of(args_[1]);
      break;
    case Spelling::tensor_inputs:
      output_ = one_of(args_[0]);
      input_ = inner_of(args_[1]);
      break;
    case Spelling::output_input_splits:
      arguments_.output_splits = splits_of(args_[2]);
      arguments_.input_splits = splits_of(args_[3]);
      [[fallthrough]];
    case Spelling::output_input:
    case Spelling::outputs_inputs:
      output_ = nb::borrow(args_[0]);
      input_ = nb::borrow(args_[1]);
      break;
    case Spelling::options:
    case Spelling::send:
    case Spelling::recv:
    case Spelling::recv_any:
      break;
  }
  arguments_.output = output_;
  arguments_.input = input_;
  const OpTraits& traits = traits_of(op_of(*method_.form));
  if (num_ == num + 1) options_ = args_[num];
  if (options_ != nullptr) {
    read_options(options_);
  } else if (traits.rooted) {
    throw NotPlain{};
  } else if (traits.reduces) {
    arguments_.reduce_op = static_cast<int>(ReduceOp::sum);
  }
}

nb::list QuickCall::results_of(const Arranged& arranged) const {
  nb::list results;
  const bool in_place = method_.spelling == Spelling::tensor || method_.spelling == Spelling::tensors;
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
  read_keywords();
  return method_.spelling >= Spelling::send ? carry_out_message() : carry_out_collective();
}

nb::object QuickCall::carry_out_collective() {
  read_tensors();
  GroupEnd& group = *group_;
  const Scratch scratch;
  TensorReader reader(Unknown::refuse, scratch->held);
  Arranged& arranged = scratch->arranged;
  Memory& memory = scratch->memory;
  arrange(*method_.form, arguments_, group.rank(), group.size(), reader, arranged);
  if (memory.take(arranged, group.rank(), group.size()) != Obstacle::none) throw NotPlain{};
  if (!is_async_) {
    const auto ticket = ticket_of_thread();
    memory.fill(ticket->request, arranged, group.size());
    const Outcome outcome = run_call(group, ticket, timeout_);
    if (outcome.result != Result::finished) fail(arranged.call, outcome.result, outcome.seq);
    if (returns_shared_) return hooks().done;
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
  if (options_ != nullptr) throw NotPlain{};
  const bool is_from_any = method_.spelling == Spelling::recv_any;
  if (is_from_any && keywords_ != nullptr) throw NotPlain{};
  const Py_ssize_t tag_at = is_from_any ? 1 : 2;
  if (num_ < tag_at || num_ > tag_at + 1) throw NotPlain{};
  const nb::object tensor = one_of(args_[0]);
  const std::int64_t peer = is_from_any ? kAnySource : small_int(args_[1]);
  const std::int64_t tag = num_ > tag_at ? small_int(args_[tag_at]) : 0;
  GroupEnd& group = *group_;
  const bool is_peer = is_from_any ? group.size() > 1 : peer >= 0 && peer < group.size();
  if (!is_peer || tag < 0 || tag > INT32_MAX) throw NotPlain{};
  const Scratch scratch;
  TensorReader reader(Unknown::refuse, scratch->held);
  const TensorView view = reader.read(tensor.ptr(), "tensor");
  if (!is_plain(view)) throw NotPlain{};
  const bool sends = method_.spelling == Spelling::send;
  auto ticket = message_of(view, sends, static_cast<int>(peer), static_cast<std::uint32_t>(tag));
  const Description call = ticket->call;
  const Started started = start_message(group, std::move(ticket), timeout_, storage_of(view));
  // Refused before it was made: the Python method explains it.
  if (started.result == Result::not_writable) throw NotPlain{};
  if (started.result != Result::finished && started.result != Result::pending) fail(call, started.result, 0);
  // The work of a send that has ended, from a list as torch passes it, is shared and has no result.
  if (sends && is_async_ && !started.pending.is_valid() && PyList_CheckExact(args_[0])) return hooks().done;
  const std::string_view op = traits_of(call.op).name;
  nb::object work = hooks().messaged(nb::handle(self_), group_object_, nb::str(op.data(), op.size()), tensor,
                                     started.pending.is_valid() ? started.pending : nb::none(), peer, timeout_);
  if (!is_async_) work.attr("wait")();
  return work;
}

}  // namespace

Hooks& hooks() {
  static auto* const made = new Hooks;
  return *made;
}

const Method* find_method(std::string_view name) {
  const auto* found =
      std::find_if(std::begin(kMethods), std::end(kMethods), [&](const Method& method) { return method.name == name; });
  return found == std::end(kMethods) ? nullptr : found;
}

nb::object carry_out_plain(const Method& method, PyObject* self, PyObject* const* args, Py_ssize_t num,
                           PyObject* keywords) {
  return QuickCall(method, self, args, num, keywords).carry_out();
}

}  // namespace phalanx
