// Reads torch's tensors through DLPack's C exchange API, without torch's headers. With the GIL held.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "blocks.hpp"
#include "description.hpp"

namespace phalanx {

// A dense tensor. Borrowed: valid as long as nobody gives the tensor other memory or another shape.
struct TensorView {
  PyObject* object;
  std::byte* data;
  std::int64_t numel;
  DType dtype;
  std::uint32_t unlisted_dtype;  // as in Description
  std::uint32_t width;
  std::int32_t ndim;
  const std::int64_t* shape;
  bool contiguous;
  Device device = Device::cpu;

  std::uint64_t bytes() const noexcept { return static_cast<std::uint64_t>(numel) * width; }
  Piece piece() const noexcept { return {data, bytes()}; }
};

// Thrown where a tensor can't be read by this file and nobody is to look closer.
struct UnknownTensor {};

enum class Unknown : bool { refuse, look_closer };

// What a call is read for: its bytes are moved here, or it is only described and another engine moves them. Then a
// tensor may lie anywhere, and what that engine can do is its own business.
enum class Reading : bool { to_move, to_describe };

// Reads the tensors of one call. Python looks closer at a tensor that DLPack does not know: set_torch says how.
class TensorReader {
 public:
  TensorReader(Unknown unknown, std::vector<nanobind::object>& held, Reading reading = Reading::to_move)
      : unknown_(unknown), reading_(reading), held_(held) {}
  // Of a tensor that is not contiguous only Python tells all. `index` is the place in a list, or -1.
  TensorView read(PyObject* tensor, const char* name, Py_ssize_t index = -1);

  bool only_describes() const noexcept { return reading_ == Reading::to_describe; }

  // Throws where nobody is to look closer.
  void need_python() const {
    if (unknown_ == Unknown::refuse) throw UnknownTensor{};
  }

 private:
  TensorView read_quickly(PyObject* tensor, const char* name, Py_ssize_t index);
  TensorView read_closer(PyObject* tensor, const char* name, Py_ssize_t index);

  const Unknown unknown_;
  const Reading reading_;
  // Of tensors that Python has looked at. Views point into them, which stay where they are when there are more.
  std::vector<std::vector<std::int64_t>> shapes_;
  // The tensors that were read. Wherever Python code runs or the GIL is given up, others may change the lists of the
  // call.
  std::vector<nanobind::object>& held_;
};

std::string argument_name(const char* name, Py_ssize_t index);

// Whether the elements lie in plain row-major memory as they are: a view may be lazily negated or conjugated.
bool is_plain(const TensorView& tensor);

// What keeps the tensor's memory, even where the program gives the tensor object other memory.
nanobind::object storage_of(const TensorView& tensor);
// Whether torch has allocated the storage: other memory may be read-only.
bool is_torchs_own(nanobind::handle storage);

void bind_tensors(nanobind::module_& module);

}  // namespace phalanx
