#include "front_options.hpp"

#include <datetime.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memory.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

// The fields, in the order of `kFields`.
enum Field : std::size_t { kTimeout, kAsync, kReduceOp, kRoot, kRootTensor, kNumFields };

struct FieldTraits {
  const char* name;   // of the attribute
  std::size_t width;  // bytes of the number in the C++ object
};

constexpr std::array<FieldTraits, kNumFields> kFields{{
    {"timeout", 8},  // milliseconds
    {"asyncOp", 1},
    {"reduceOp", 1},
    {"rootRank", 8},
    {"rootTensor", 8},
}};

constexpr std::ptrdiff_t kNotLearned = -1;

struct Class {
  PyObject* type;
  std::array<std::ptrdiff_t, kNumFields> offsets;
};

struct Known {
  std::vector<Class> classes;
  std::vector<PyObject*> reduce_ops;  // classes whose hash is the number
  std::array<PyObject*, kNumFields> names{};
};

// With the GIL held; never destroyed.
Known& known() {
  static auto* const made = [] {
    auto* fresh = new Known;
    for (std::size_t i = 0; i < kNumFields; ++i) fresh->names[i] = PyUnicode_InternFromString(kFields[i].name);
    return fresh;
  }();
  return *made;
}

// pybind11 keeps the address of the C++ object behind the head of the Python object.
const char* const& address_in(PyObject* object) {
  return *reinterpret_cast<const char* const*>(reinterpret_cast<const char*>(object) + sizeof(PyObject));
}

std::int64_t number_at(const char* memory, std::size_t width) {
  if (width == 1) return static_cast<std::uint8_t>(*memory);
  std::int64_t number;
  std::memcpy(&number, memory, sizeof(number));
  return number;
}

// Bytes of the C++ object and behind, as far as they can be read.
std::string memory_of(PyObject* object) {
  constexpr std::size_t kWindow = 256;
  return readable_bytes(address_in(object), kWindow);
}

// The only offset at which all objects have their numbers.
std::ptrdiff_t offset_of(const std::vector<std::string>& memories, const std::vector<std::int64_t>& numbers,
                         std::size_t width) {
  std::ptrdiff_t found = kNotLearned;
  for (std::size_t at = 0; at + width <= memories[0].size(); at += width) {
    bool agrees = true;
    for (std::size_t i = 0; agrees && i < memories.size(); ++i) {
      agrees = at + width <= memories[i].size() && number_at(memories[i].data() + at, width) == numbers[i];
    }
    if (!agrees) continue;
    if (found != kNotLearned) return kNotLearned;
    found = static_cast<std::ptrdiff_t>(at);
  }
  return found;
}

std::optional<std::int64_t> milliseconds_of(PyObject* delta) {
  if (!PyDelta_CheckExact(delta)) return std::nullopt;
  const std::int64_t seconds =
      std::int64_t{PyDateTime_DELTA_GET_DAYS(delta)} * 86400 + PyDateTime_DELTA_GET_SECONDS(delta);
  return seconds * 1000 + PyDateTime_DELTA_GET_MICROSECONDS(delta) / 1000;
}

// The field as a number, from the attribute.
std::optional<std::int64_t> number_of(PyObject* options, Field field) {
  const nb::object value = nb::steal(PyObject_GetAttr(options, known().names[field]));
  if (!value.is_valid()) {
    PyErr_Clear();
    return std::nullopt;
  }
  if (field == kTimeout) return milliseconds_of(value.ptr());
  if (field == kReduceOp) {
    const int number = reduce_op_of(value.ptr());
    return number < 0 ? std::nullopt : std::optional<std::int64_t>(number);
  }
  if (PyBool_Check(value.ptr())) return value.is(Py_True);
  if (!PyLong_CheckExact(value.ptr())) return std::nullopt;
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  return overflow != 0 ? std::nullopt : std::optional<std::int64_t>(number);
}

bool read_field(PyObject* options, const Class& type, Field field, std::int64_t& found) {
  const std::ptrdiff_t offset = type.offsets[field];
  if (offset != kNotLearned) {
    const char* memory = address_in(options);
    // An object that was made without __init__ has none.
    if (memory == nullptr) return false;
    found = number_at(memory + offset, kFields[field].width);
    return true;
  }
  const std::optional<std::int64_t> number = number_of(options, field);
  if (number) found = *number;
  return number.has_value();
}

bool is_reduce_op(PyObject* object) {
  const auto& classes = known().reduce_ops;
  return std::find(classes.begin(), classes.end(), reinterpret_cast<PyObject*>(Py_TYPE(object))) != classes.end();
}

// Which fields were learned.
std::map<std::string, bool> learn(nb::type_object type, const std::vector<nb::object>& samples) {
  Class learned{type.inc_ref().ptr(), {}};
  std::vector<std::string> memories;
  for (const nb::object& sample : samples) memories.push_back(memory_of(sample.ptr()));
  std::map<std::string, bool> told;
  for (std::size_t i = 0; i < kNumFields; ++i) {
    std::vector<std::int64_t> numbers;
    for (const nb::object& sample : samples) {
      const auto number = number_of(sample.ptr(), static_cast<Field>(i));
      if (number) numbers.push_back(*number);
    }
    learned.offsets[i] = kNotLearned;
    if (numbers.empty()) continue;
    if (numbers.size() == samples.size()) learned.offsets[i] = offset_of(memories, numbers, kFields[i].width);
    told[kFields[i].name] = learned.offsets[i] != kNotLearned;
  }
  known().classes.push_back(learned);
  return told;
}

}  // namespace

int reduce_op_of(PyObject* op) {
  if (!is_reduce_op(op)) return -1;
  const Py_hash_t number = PyObject_Hash(op);
  if (number == -1 && PyErr_Occurred() != nullptr) PyErr_Clear();
  return number < 0 || number > INT8_MAX ? -1 : static_cast<int>(number);
}

bool read_options(PyObject* options, const OptionsWanted& wanted, CallOptions& found) {
  const auto& classes = known().classes;
  const auto type = std::find_if(classes.begin(), classes.end(), [&](const Class& one) {
    return one.type == reinterpret_cast<PyObject*>(Py_TYPE(options));
  });
  if (type == classes.end()) return false;
  std::int64_t number = 0;
  if (!read_field(options, *type, kAsync, number)) return false;
  found.is_async = number != 0;
  if (!read_field(options, *type, kTimeout, found.timeout_ms)) return false;
  if (wanted.reduce_op) {
    if (!read_field(options, *type, kReduceOp, number)) return false;
    found.reduce_op = static_cast<int>(number);
  }
  if (wanted.root && !read_field(options, *type, kRoot, found.root)) return false;
  return !wanted.root_tensor || read_field(options, *type, kRootTensor, found.root_tensor);
}

void bind_options(nb::module_& module) {
  PyDateTime_IMPORT;
  module.def(
      "set_reduce_ops",
      [](const std::vector<nb::object>& classes) {
        for (const nb::object& one : classes) known().reduce_ops.push_back(one.inc_ref().ptr());
      },
      "classes"_a, "Classes whose hash is the number of the reduce op. To be called before `learn_options`.");
  module.def("learn_options", &learn, "type"_a, "samples"_a,
             "Takes a class for one of torch's options. Returns whether each of its fields is read from memory.");
  module.def(
      "read_options",
      [](nb::handle options, bool reduce_op, bool root, bool root_tensor) -> nb::object {
        CallOptions found{};
        if (!read_options(options.ptr(), {reduce_op, root, root_tensor}, found)) return nb::none();
        return nb::make_tuple(found.timeout_ms, found.is_async, found.reduce_op, found.root, found.root_tensor);
      },
      "options"_a, "reduce_op"_a, "root"_a, "root_tensor"_a,
      nb::sig("def read_options(options: object, reduce_op: bool, root: bool, root_tensor: bool) "
              "-> tuple[int, bool, int, int, int] | None"),
      "For tests: timeout in milliseconds, asynchronous or not, reduce op, root, root tensor.");
}

}  // namespace phalanx
