#include "front_spelled.hpp"

#include <algorithm>
#include <cstddef>

#include "front_options.hpp"
#include "kernels.hpp"

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
  PyObject* opts = PyUnicode_InternFromString("opts");
  PyObject* async_op = PyUnicode_InternFromString("async_op");
};

const Names& names() {
  static const auto* const made = new Names;
  return *made;
}

std::int64_t small_int(PyObject* number) {
  if (!PyLong_CheckExact(number)) throw NotPlain{};
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
  if (overflow != 0) throw NotPlain{};
  return value;
}

// PREMUL_SUM has a factor, which Python reads.
int take_reduce_op(int number) {
  if (number < 0 || number >= static_cast<int>(ReduceOp::premul_sum)) throw NotPlain{};
  return number;
}

}  // namespace

void SpelledCall::read() {
  read_keywords();
  if (is_message()) {
    read_message();
  } else {
    read_tensors();
  }
}

void SpelledCall::read_keywords() {
  const Py_ssize_t num = keywords_ == nullptr ? 0 : PyTuple_GET_SIZE(keywords_);
  for (Py_ssize_t i = 0; i < num; ++i) {
    PyObject* name = PyTuple_GET_ITEM(keywords_, i);
    PyObject* value = args_[num_ + i];
    if (name == names().opts) {
      options_ = value;
    } else if (name == names().async_op && PyBool_Check(value)) {
      is_async = value == Py_True;
    } else {
      throw NotPlain{};
    }
  }
}

void SpelledCall::read_options(PyObject* options) {
  const OpTraits& traits = traits_of(op_of(*method_.form));
  const bool has_root_tensor = traits.rooted && method_.spelling == Spelling::tensor;
  CallOptions found{};
  if (!phalanx::read_options(options, {traits.reduces, traits.rooted, has_root_tensor}, found)) {
    // group.all_reduce(tensor, ReduceOp.MAX)
    if (method_.form != Form::all_reduce) throw NotPlain{};
    arguments.reduce_op = take_reduce_op(reduce_op_of(options));
    return;
  }
  if (is_async) {
    is_async = found.is_async;
    returns_shared = !is_async;
  }
  constexpr std::int64_t kNotGiven = -1, kMostMilliseconds = 1'000'000'000'000;
  if (found.timeout_ms != kNotGiven) {
    if (found.timeout_ms <= 0 || found.timeout_ms > kMostMilliseconds) throw NotPlain{};
    timeout = static_cast<double>(found.timeout_ms) / 1000;
  }
  if (traits.reduces) arguments.reduce_op = take_reduce_op(found.reduce_op);
  if (traits.rooted) arguments.root = found.root;
  if (has_root_tensor && found.root_tensor != 0) throw NotPlain{};
}

// The one tensor of a call: torch passes it in a list.
nb::object SpelledCall::one_of(PyObject* list) {
  if (!PyList_CheckExact(list)) return nb::borrow(list);
  if (PyList_GET_SIZE(list) != 1) throw NotPlain{};
  return nb::borrow(PyList_GET_ITEM(list, 0));
}

// The one list of tensors of a call: torch passes it in another list.
nb::object SpelledCall::inner_of(PyObject* list) {
  if (!PyList_CheckExact(list)) throw NotPlain{};
  if (PyList_GET_SIZE(list) == 0 || !PyList_CheckExact(PyList_GET_ITEM(list, 0))) return nb::borrow(list);
  if (PyList_GET_SIZE(list) != 1) throw NotPlain{};
  return nb::borrow(PyList_GET_ITEM(list, 0));
}

std::vector<std::int64_t> SpelledCall::splits_of(PyObject* list) const {
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

void SpelledCall::read_tensors() {
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
      arguments.output_splits = splits_of(args_[2]);
      arguments.input_splits = splits_of(args_[3]);
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
  arguments.output = output_;
  arguments.input = input_;
  const OpTraits& traits = traits_of(op_of(*method_.form));
  if (num_ == num + 1) options_ = args_[num];
  if (options_ != nullptr) {
    read_options(options_);
  } else if (traits.rooted) {
    throw NotPlain{};
  } else if (traits.reduces) {
    arguments.reduce_op = static_cast<int>(ReduceOp::sum);
  }
}

void SpelledCall::read_message() {
  if (options_ != nullptr) throw NotPlain{};
  const bool is_from_any = method_.spelling == Spelling::recv_any;
  if (is_from_any && keywords_ != nullptr) throw NotPlain{};
  const Py_ssize_t tag_at = is_from_any ? 1 : 2;
  if (num_ < tag_at || num_ > tag_at + 1) throw NotPlain{};
  is_listed = PyList_CheckExact(args_[0]);
  tensor = one_of(args_[0]);
  if (!is_from_any) peer = small_int(args_[1]);
  if (num_ > tag_at) tag = small_int(args_[tag_at]);
  if (tag < 0 || tag > INT32_MAX) throw NotPlain{};
}

const Method* find_method(std::string_view name) {
  const auto* found =
      std::find_if(std::begin(kMethods), std::end(kMethods), [&](const Method& method) { return method.name == name; });
  return found == std::end(kMethods) ? nullptr : found;
}

}  // namespace phalanx
