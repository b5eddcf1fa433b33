// Whether a tensor is lazily negated or conjugated: DLPack does not tell.
//
// torch's is_neg() and is_conj() give up the GIL and take it back, per tensor. The C++ object behind a tensor has one
// bit for each. Nothing about its layout is written down here: samples show it when the package is imported, and where
// they do not, torch's methods are asked. See docs/decisions/0012-native-front.md.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

namespace phalanx {

struct LazySample {
  nanobind::object tensor;
  bool is_neg;
  bool is_conj;
};

class LazyBits {
 public:
  // The bits, if the samples leave exactly one place for each.
  static std::optional<LazyBits> learn(const std::vector<LazySample>& samples);

  // Of a tensor of a plain class: their objects are laid out alike.
  bool any_set(PyObject* tensor) const noexcept {
    const char* implementation;
    std::memcpy(&implementation, reinterpret_cast<const char*>(tensor) + pointer_, sizeof(implementation));
    return ((implementation[neg_.offset] & neg_.mask) | (implementation[conj_.offset] & conj_.mask)) != 0;
  }

 private:
  struct Bit {
    std::size_t offset;
    char mask;
  };

  std::size_t pointer_ = 0;  // where a Python object has the address of the C++ object
  Bit neg_{}, conj_{};
};

}  // namespace phalanx
