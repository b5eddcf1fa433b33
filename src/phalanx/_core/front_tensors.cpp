#include "front_tensors.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "dlpack.hpp"
#include "front_lazy.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

// A method in C that takes no arguments, called without Python's machinery for calls.
class NoArguments {
 public:
  NoArguments() = default;
  explicit NoArguments(nb::object method) : method_(std::move(method)) {
    if (!PyObject_TypeCheck(method_.ptr(), &PyMethodDescr_Type)) return;
    const PyMethodDef* definition = reinterpret_cast<PyMethodDescrObject*>(method_.ptr())->d_method;
    if ((definition->ml_flags & ~METH_COEXIST) == METH_NOARGS) function_ = definition->ml_meth;
  }
  nb::object operator()(PyObject* self) const {
    const bool is_own = function_ != nullptr && PyObject_TypeCheck(self, PyDescr_TYPE(method_.ptr()));
    nb::object found = nb::steal(is_own ? function_(self, nullptr) : PyObject_CallOneArg(method_.ptr(), self));
    if (!found.is_valid()) throw nb::python_error();
    return found;
  }

 private:
  nb::object method_;
  PyCFunction function_ = nullptr;
};

// What of torch the front uses. Set once, before the first call; never destroyed.
struct Torch {
  const dlpack::ExchangeApi* api = nullptr;
  // Tensors of other classes may carry out calls themselves.
  std::vector<PyObject*> plain_classes;
  NoArguments is_neg, is_conj, untyped_storage, resizable;
  std::optional<LazyBits> lazy_bits;
  // torch shows its dtypes below a byte as if they were of a byte. Only the dtype object tells.
  nb::object uint8, int8;
  nb::object strided;
  // How often DLPack has refused a tensor, and the dtypes for which it did.
  std::size_t num_refused = 0;
  std::vector<nb::object> refused_dtypes;
  // (name, tensor): raises, or returns (address, number of the dtype, hash of an unlisted dtype, bytes of an element,
  // shape, strides).
  nb::object look_closer;
};

Torch& torch() {
  static auto* const made = new Torch;
  return *made;
}

bool is_of_plain_class(PyObject* tensor) {
  const auto& classes = torch().plain_classes;
  return std::find(classes.begin(), classes.end(), reinterpret_cast<PyObject*>(Py_TYPE(tensor))) != classes.end();
}

struct Known {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint8_t lanes;
  DType dtype;
};

constexpr std::array kKnown{
    Known{dlpack::kFloat, 32, 1, DType::float32},
    Known{dlpack::kBfloat, 16, 1, DType::bfloat16},
    Known{dlpack::kInt, 64, 1, DType::int64},
    Known{dlpack::kFloat, 16, 1, DType::float16},
    Known{dlpack::kInt, 32, 1, DType::int32},
    Known{dlpack::kFloat, 64, 1, DType::float64},
    Known{dlpack::kBool, 8, 1, DType::boolean},
    Known{dlpack::kUInt, 8, 1, DType::uint8},
    Known{dlpack::kInt, 8, 1, DType::int8},
    Known{dlpack::kInt, 16, 1, DType::int16},
    Known{dlpack::kUInt, 16, 1, DType::uint16},
    Known{dlpack::kUInt, 32, 1, DType::uint32},
    Known{dlpack::kUInt, 64, 1, DType::uint64},
    Known{dlpack::kComplex, 64, 1, DType::complex64},
    Known{dlpack::kComplex, 128, 1, DType::complex128},
    Known{dlpack::kComplex, 32, 1, DType::complex32},
    Known{dlpack::kFloat8E4m3fn, 8, 1, DType::float8_e4m3fn},
    Known{dlpack::kFloat8E5m2, 8, 1, DType::float8_e5m2},
    Known{dlpack::kFloat8E4m3fnuz, 8, 1, DType::float8_e4m3fnuz},
    Known{dlpack::kFloat8E5m2fnuz, 8, 1, DType::float8_e5m2fnuz},
};

nb::object attribute(PyObject* tensor, PyObject* name) {
  nb::object found = nb::steal(PyObject_GetAttr(tensor, name));
  if (!found.is_valid()) throw nb::python_error();
  return found;
}

nb::object dtype_object(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("dtype");
  return attribute(tensor, name);
}

// Whether DLPack refuses such tensors, as far as this process has seen. To refuse one takes milliseconds: torch throws
// an exception whose message contains the whole stack trace.
bool is_refused(PyObject* tensor) {
  const Torch& known = torch();
  if (known.num_refused == 0) return false;
  static PyObject* const layout = PyUnicode_InternFromString("layout");
  if (!attribute(tensor, layout).is(known.strided)) return true;
  const nb::object dtype = dtype_object(tensor);
  return std::any_of(known.refused_dtypes.begin(), known.refused_dtypes.end(),
                     [&](const nb::object& refused) { return dtype.is(refused); });
}

bool is_in_table(DType dtype) {
  return std::any_of(kKnown.begin(), kKnown.end(), [&](const Known& known) { return known.dtype == dtype; });
}

// DType::none: not known here.
DType dtype_of(const dlpack::DataType& type, PyObject* tensor) {
  const auto found = std::find_if(kKnown.begin(), kKnown.end(), [&](const Known& known) {
    return known.code == type.code && known.bits == type.bits && known.lanes == type.lanes;
  });
  if (found == kKnown.end()) return DType::none;
  if (found->dtype == DType::uint8 || found->dtype == DType::int8) {
    const nb::object dtype = dtype_object(tensor);
    if (!dtype.is(found->dtype == DType::uint8 ? torch().uint8 : torch().int8)) return DType::none;
  }
  return found->dtype;
}

Device device_of(std::int32_t type) noexcept {
  switch (type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      return Device::cpu;
    case dlpack::kCuda:
    case dlpack::kRocm:
      return Device::cuda;
    case dlpack::kOneApi:
      return Device::xpu;
    default:
      return Device::other;
  }
}

std::int64_t numel_of(const std::int64_t* shape, std::int32_t ndim) {
  std::int64_t numel = 1;
  for (std::int32_t i = 0; i < ndim; ++i) numel *= shape[i];
  return numel;
}

// As torch has it: dimensions of size 1 may have any stride, and a tensor without elements is contiguous.
bool is_contiguous(const std::int64_t* shape, const std::int64_t* strides, std::int32_t ndim, std::int64_t numel) {
  if (numel == 0) return true;
  std::int64_t expected = 1;
  for (std::int32_t i = ndim - 1; i >= 0; --i) {
    if (shape[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

// Negated or conjugated, but not in memory.
bool is_lazy(PyObject* tensor) {
  if (torch().lazy_bits && is_of_plain_class(tensor)) return torch().lazy_bits->any_set(tensor);
  return torch().is_neg(tensor).is(Py_True) || torch().is_conj(tensor).is(Py_True);
}

}  // namespace

std::string argument_name(const char* name, Py_ssize_t index) {
  return index < 0 ? name : std::string(name) + "[" + std::to_string(index) + "]";
}

TensorView TensorReader::read(PyObject* tensor, const char* name, Py_ssize_t index) {
  held_.push_back(nb::borrow(tensor));
  const TensorView found = read_quickly(tensor, name, index);
  if (!found.contiguous && !only_describes()) need_python();
  return found;
}

TensorView TensorReader::read_quickly(PyObject* tensor, const char* name, Py_ssize_t index) {
  if (torch().api == nullptr) throw std::logic_error("set_torch was not called");
  if (!is_of_plain_class(tensor) || is_refused(tensor)) return read_closer(tensor, name, index);
  dlpack::Tensor found;
  if (torch().api->borrow_from_object(tensor, &found) != 0) {
    PyErr_Clear();
    ++torch().num_refused;
    const TensorView seen = read_closer(tensor, name, index);
    // A precaution: a tensor with a dtype of the table was refused for something else.
    if (!is_in_table(seen.dtype)) torch().refused_dtypes.push_back(dtype_object(tensor));
    return seen;
  }
  const DType dtype = dtype_of(found.dtype, tensor);
  const std::int64_t numel = numel_of(found.shape, found.ndim);
  // Tensors that only pretend to have memory have address 0.
  const bool has_memory = found.data != nullptr || numel == 0;
  const bool is_usable = found.device_type == dlpack::kCpu && has_memory && found.byte_offset == 0;
  if (dtype == DType::none || !(is_usable || only_describes())) return read_closer(tensor, name, index);
  return {tensor,
          static_cast<std::byte*>(found.data),
          numel,
          dtype,
          0,
          static_cast<std::uint32_t>(element_size(dtype)),
          found.ndim,
          found.shape,
          is_contiguous(found.shape, found.strides, found.ndim, numel),
          device_of(found.device_type)};
}

TensorView TensorReader::read_closer(PyObject* tensor, const char* name, Py_ssize_t index) {
  need_python();
  const nb::object found = torch().look_closer(argument_name(name, index), nb::handle(tensor));
  using Parts = std::tuple<std::uint64_t, int, std::uint32_t, std::uint32_t, std::vector<std::int64_t>,
                           std::vector<std::int64_t>>;
  auto [address, dtype, unlisted, width, shape, strides] = nb::cast<Parts>(found);
  const std::vector<std::int64_t>& kept = shapes_.emplace_back(std::move(shape));
  const auto ndim = static_cast<std::int32_t>(kept.size());
  const std::int64_t numel = numel_of(kept.data(), ndim);
  return {tensor,
          reinterpret_cast<std::byte*>(address),
          numel,
          static_cast<DType>(dtype),
          unlisted,
          width,
          ndim,
          kept.data(),
          is_contiguous(kept.data(), strides.data(), ndim, numel)};
}

bool is_plain(const TensorView& tensor) { return tensor.contiguous && !is_lazy(tensor.object); }

nb::object storage_of(const TensorView& tensor) { return torch().untyped_storage(tensor.object); }

bool is_torchs_own(nb::handle storage) { return torch().resizable(storage.ptr()).is(Py_True); }

void bind_tensors(nb::module_& module) {
  module.def(
      "set_torch",
      [](nb::object api, const std::vector<nb::object>& plain_classes, nb::object is_neg, nb::object is_conj,
         nb::object untyped_storage, nb::object resizable, nb::object uint8, nb::object int8, nb::object strided,
         nb::object look_closer) {
        const auto* table = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(api.ptr(), dlpack::kCapsule));
        if (table == nullptr) throw nb::python_error();
        while (table != nullptr && table->version.major != dlpack::kMajor) table = table->previous;
        if (table == nullptr || table->borrow_from_object == nullptr) {
          throw std::runtime_error("torch's DLPack exchange API has no version that is known here");
        }
        Torch& known = torch();
        known.api = table;
        // Kept for good, like the capsule's table.
        for (const nb::object& one : plain_classes) known.plain_classes.push_back(one.inc_ref().ptr());
        known.is_neg = NoArguments(std::move(is_neg));
        known.is_conj = NoArguments(std::move(is_conj));
        known.untyped_storage = NoArguments(std::move(untyped_storage));
        known.resizable = NoArguments(std::move(resizable));
        known.uint8 = std::move(uint8);
        known.int8 = std::move(int8);
        known.strided = std::move(strided);
        known.look_closer = std::move(look_closer);
      },
      nb::arg("api"), nb::arg("plain_classes"), nb::arg("is_neg"), nb::arg("is_conj"), nb::arg("untyped_storage"),
      nb::arg("resizable"), nb::arg("uint8"), nb::arg("int8"), nb::arg("strided"), nb::arg("look_closer"),
      "What of torch the front reads tensors with. To be called once, before the first call.");
  module.def(
      "learn_lazy_bits",
      [](const std::vector<std::tuple<nb::object, bool, bool>>& samples) {
        torch().lazy_bits.reset();
        std::vector<LazySample> shown;
        for (const auto& [tensor, is_neg, is_conj] : samples) {
          // What is learned from other classes does not hold for these.
          if (!is_of_plain_class(tensor.ptr())) return false;
          shown.push_back({tensor, is_neg, is_conj});
        }
        torch().lazy_bits = LazyBits::learn(shown);
        return torch().lazy_bits.has_value();
      },
      nb::arg("samples"),
      "Finds out where tensors say that they are lazily negated or conjugated, by (tensor, negated, conjugated). "
      "Returns "
      "whether it did; if not, torch's methods are asked.");
  module.def(
      "num_refused_by_dlpack", [] { return torch().num_refused; }, "For tests: how many tensors DLPack has refused.");
  module.def(
      "is_lazy", [](nb::handle tensor) { return is_lazy(tensor.ptr()); }, nb::arg("tensor"),
      "For tests: whether a tensor is lazily negated or conjugated.");
}

}  // namespace phalanx
