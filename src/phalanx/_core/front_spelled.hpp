// Calls in the spellings that torch uses, read into what the forms take. Only what torch's own functions pass is read
// here; everything else is left to Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "front_forms.hpp"

namespace phalanx {

// How torch passes the arguments of a method: tensors in lists, the options last.
enum class Spelling : std::uint8_t {
  options,              // (opts)
  tensor,               // ([tensor], opts)
  tensors,              // (tensors, opts)
  output_input,         // (output, input, opts)
  outputs_inputs,       // (outputs, inputs, opts)
  outputs_tensor,       // ([outputs], [tensor], opts)
  tensor_inputs,        // ([tensor], [inputs], opts)
  output_input_splits,  // (output, input, output_splits, input_splits, opts)
  send,                 // ([tensor], peer, tag)
  recv,                 // ([tensor], peer, tag)
  recv_any,             // ([tensor], tag)
};

struct Method {
  std::string_view name;
  Spelling spelling;
  std::optional<Form> form;  // of a collective
};

// Thrown where Python has to read the call.
struct NotPlain {};

// nullptr where there is none of that name.
const Method* find_method(std::string_view name);

// One call of a method. What it is given is kept for its time: others may change the lists that it comes in.
class SpelledCall {
 public:
  // `num` arguments come by position, then those of `keywords`.
  SpelledCall(const Method& method, PyObject* const* args, Py_ssize_t num, PyObject* keywords)
      : method_(method), args_(args), num_(num), keywords_(keywords) {}

  // Throws NotPlain, or a Python exception. With the GIL held.
  void read();

  const Method& method() const noexcept { return method_; }
  bool is_message() const noexcept { return method_.spelling >= Spelling::send; }

  // Of a collective.
  Arguments arguments;
  // Of a message.
  nanobind::object tensor;
  std::int64_t peer = kAnySource;
  std::int64_t tag = 0;
  bool is_listed = false;  // the tensor came in a list, as from torch's functions
  // Of the options.
  std::optional<double> timeout;
  bool is_async = true;
  bool returns_shared = false;  // torch drops the work of a call whose options say that it is synchronous

 private:
  void read_keywords();
  void read_options(PyObject* options);
  void read_tensors();
  void read_message();
  static nanobind::object one_of(PyObject* list);
  static nanobind::object inner_of(PyObject* list);
  std::vector<std::int64_t> splits_of(PyObject* list) const;

  const Method& method_;
  PyObject* const* const args_;
  const Py_ssize_t num_;
  PyObject* const keywords_;
  PyObject* options_ = nullptr;
  nanobind::object output_, input_;
};

}  // namespace phalanx
