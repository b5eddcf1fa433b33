#include "front_checks.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "kernels.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

// Who decides in Python about tensors that are not contiguous. Set once; never destroyed.
struct MemoryLook {
  nb::object overlaps_itself;  // (tensor) -> bool
  nb::object find_shared;      // (tensors) -> (int, int) or None
};

MemoryLook& look() {
  static auto* const made = new MemoryLook;
  return *made;
}

nb::object own(nb::handle object) { return nb::borrow(object); }

Problem problem(ProblemKind kind, std::string name, std::int64_t expected = 0, std::int64_t actual = 0,
                std::string other = {}) {
  return {kind, std::move(name), std::move(other), expected, actual, nb::none(), nb::none()};
}

Problem problem_of(ProblemKind kind, std::string name, nb::handle got) {
  Problem found = problem(kind, std::move(name));
  found.got = own(got);
  return found;
}

// Of a list or tuple.
Py_ssize_t length_of(nb::handle list, const char* name) {
  if (!PyList_Check(list.ptr()) && !PyTuple_Check(list.ptr())) throw problem_of(ProblemKind::not_a_list, name, list);
  return PySequence_Fast_GET_SIZE(list.ptr());
}

// Whether it is clear that no two of these share memory. Python finds out about tensors that are not contiguous.
bool are_apart(const Views& tensors) {
  using Extent = std::pair<const std::byte*, const std::byte*>;
  constexpr std::size_t kFew = 8;
  const bool contiguous =
      std::all_of(tensors.begin(), tensors.end(), [](const TensorView& tensor) { return tensor.contiguous; });
  if (!contiguous) return false;
  std::array<Extent, kFew> few;
  std::vector<Extent> many(tensors.size() > kFew ? tensors.size() : 0);
  Extent* const first = many.empty() ? few.data() : many.data();
  Extent* last = first;
  for (const TensorView& tensor : tensors) {
    if (tensor.data != nullptr && tensor.numel > 0) *last++ = {tensor.data, tensor.data + tensor.bytes()};
  }
  std::sort(first, last);
  return std::adjacent_find(first, last, [](const Extent& before, const Extent& after) {
           return after.first < before.second;
         }) == last;
}

bool is_of_dtype(const TensorView& tensor, const TensorView& like) noexcept {
  return tensor.dtype == like.dtype && tensor.unlisted_dtype == like.unlisted_dtype;
}

}  // namespace

std::string entry_of(const std::string& list, std::size_t index) { return list + "[" + std::to_string(index) + "]"; }

TensorView read_one(TensorReader& reader, nb::handle tensor, const char* name, Py_ssize_t index, bool written) {
  const TensorView view = reader.read(tensor.ptr(), name, index);
  if (written && !view.contiguous && !reader.only_describes() && nb::cast<bool>(look().overlaps_itself(tensor))) {
    throw problem_of(ProblemKind::overlaps_self, argument_name(name, index), tensor);
  }
  return view;
}

void read_several(TensorReader& reader, Views& tensors, nb::handle list, const char* name, bool written,
                  std::int64_t num) {
  const Py_ssize_t length = length_of(list, name);
  if (num >= 0 && length != num) throw problem(ProblemKind::wrong_length, name, num, length);
  if (length == 0) throw problem(ProblemKind::empty_list, name);
  tensors.reserve(tensors.size() + static_cast<std::size_t>(length));
  for (Py_ssize_t i = 0; i < length; ++i) {
    // Reading may run Python code, and other threads with it, which may change the list.
    const Py_ssize_t now = PySequence_Fast_GET_SIZE(list.ptr());
    if (now != length) throw problem(ProblemKind::wrong_length, name, length, now);
    const nb::object tensor = own(PySequence_Fast_ITEMS(list.ptr())[i]);
    tensors.push_back(read_one(reader, tensor, name, i, written));
  }
}

void check_no_list(nb::handle list, const char* name) {
  if (!list.is_valid() || list.is_none()) return;
  const Py_ssize_t num = length_of(list, name);
  if (num > 0) throw problem(ProblemKind::not_the_root, name, 0, num);
}

void check_lists(nb::handle lists, const char* name, int size) {
  const bool is_list = PyList_Check(lists.ptr()) || PyTuple_Check(lists.ptr());
  if (is_list && PySequence_Fast_GET_SIZE(lists.ptr()) == size) return;
  Problem found = problem(ProblemKind::no_lists, name, size);
  found.got = own(lists);
  throw found;
}

void check_root(std::int64_t root, int size) {
  if (root < 0 || root >= size) throw problem(ProblemKind::wrong_root, "root");
}

void check_reduction(const TensorView& tensor, int reduce_op, double factor) {
  const bool is_op = reduce_op >= 0 && reduce_op < static_cast<int>(kNumReduceOps);
  bool fits = is_op && reduce_kernel(tensor.dtype, static_cast<ReduceOp>(reduce_op)) != nullptr;
  if (fits && static_cast<ReduceOp>(reduce_op) == ReduceOp::premul_sum) {
    const bool integral = tensor.dtype >= DType::boolean && tensor.dtype <= DType::int64;
    fits = !integral || (std::nearbyint(factor) == factor && factor >= -0x1p63 && factor < 0x1p64);
  }
  if (!fits) throw problem_of(ProblemKind::no_reduction, "tensor", tensor.object);
}

void check_apart(const TensorReader& reader, const Views& tensors, const char* name, std::size_t per_rank) {
  if (tensors.size() < 2 || reader.only_describes() || are_apart(tensors)) return;
  reader.need_python();
  nb::list objects;
  for (const TensorView& tensor : tensors) objects.append(nb::handle(tensor.object));
  const nb::object shared = look().find_shared(objects);
  if (shared.is_none()) return;
  const auto name_of = [&](nb::handle number) {
    const auto index = nb::cast<std::size_t>(number);
    return per_rank == 0 ? entry_of(name, index) : entry_of(entry_of(name, index / per_rank), index % per_rank);
  };
  throw problem(ProblemKind::overlaps, name_of(shared[0]), 0, 0, name_of(shared[1]));
}

void check_dtype(const TensorView& tensor, const TensorView& like, const std::string& name) {
  if (is_of_dtype(tensor, like)) return;
  Problem found = problem_of(ProblemKind::wrong_dtype, name, tensor.object);
  found.like = own(like.object);
  throw found;
}

void check_dtypes(const Views& tensors, const TensorView& like, const char* name) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!is_of_dtype(tensors[i], like)) check_dtype(tensors[i], like, tensors.size() > 1 ? entry_of(name, i) : name);
  }
}

void check_size(const TensorView& tensor, std::int64_t expected, const std::string& name, std::string other) {
  if (tensor.numel == expected) return;
  throw problem(ProblemKind::wrong_size, name, expected, tensor.numel, std::move(other));
}

void check_product(const TensorView& tensor, const TensorView& part, int size, const std::string& name) {
  const std::int64_t expected = part.numel * size;
  if (tensor.numel != expected) throw problem(ProblemKind::wrong_product, name, expected, tensor.numel);
}

void check_own(std::int64_t sent, std::int64_t received) {
  if (sent != received) throw problem(ProblemKind::wrong_own, "", received, sent);
}

void check_same_length(std::size_t actual, std::size_t expected, const std::string& name, const char* other) {
  if (actual == expected) return;
  throw problem(ProblemKind::unlike_length, name, static_cast<std::int64_t>(expected),
                static_cast<std::int64_t>(actual), other);
}

void check_splits(std::int64_t rows, const std::vector<std::int64_t>& splits, int size, const char* name,
                  const char* splits_name) {
  if (splits.empty()) {
    if (rows % size != 0) throw problem(ProblemKind::wrong_rows, name, 0, rows, splits_name);
    return;
  }
  if (splits.size() != static_cast<std::size_t>(size)) {
    throw problem(ProblemKind::wrong_splits, splits_name, size, static_cast<std::int64_t>(splits.size()));
  }
  // Without a sum that could overflow.
  std::int64_t rest = rows;
  for (const std::int64_t split : splits) rest = rest < 0 || split < 0 || split > rest ? -1 : rest - split;
  if (rest != 0) throw problem(ProblemKind::wrong_sum, splits_name, rows, 0, name);
}

void bind_checks(nb::module_& module) {
  nb::enum_<ProblemKind>(module, "ProblemKind", "What is wrong with the arguments of a call.")
      .value("not_a_list", ProblemKind::not_a_list)
      .value("wrong_length", ProblemKind::wrong_length)
      .value("empty_list", ProblemKind::empty_list)
      .value("unlike_length", ProblemKind::unlike_length)
      .value("no_lists", ProblemKind::no_lists)
      .value("not_the_root", ProblemKind::not_the_root)
      .value("wrong_dtype", ProblemKind::wrong_dtype)
      .value("wrong_size", ProblemKind::wrong_size)
      .value("wrong_product", ProblemKind::wrong_product)
      .value("wrong_own", ProblemKind::wrong_own)
      .value("wrong_rows", ProblemKind::wrong_rows)
      .value("wrong_splits", ProblemKind::wrong_splits)
      .value("wrong_sum", ProblemKind::wrong_sum)
      .value("wrong_root", ProblemKind::wrong_root)
      .value("no_reduction", ProblemKind::no_reduction)
      .value("overlaps", ProblemKind::overlaps)
      .value("overlaps_self", ProblemKind::overlaps_self);
  nb::class_<Problem>(module, "Problem",
                      "What is wrong with the arguments of a call; ProblemKind says which facts count.")
      .def_ro("kind", &Problem::kind)
      .def_ro("name", &Problem::name)
      .def_ro("other", &Problem::other)
      .def_ro("expected", &Problem::expected)
      .def_ro("actual", &Problem::actual)
      .def_prop_ro(
          "got", [](const Problem& self) { return self.got; }, nb::sig("def got(self) -> typing.Any"))
      .def_prop_ro("like", [](const Problem& self) { return self.like; }, nb::sig("def like(self) -> typing.Any"));
  module.def(
      "set_memory_look",
      [](nb::object overlaps_itself, nb::object find_shared) {
        look() = {std::move(overlaps_itself), std::move(find_shared)};
      },
      nb::arg("overlaps_itself"), nb::arg("find_shared"),
      "Who decides about tensors that are not contiguous: whether elements share memory, and which tensors do.");
}

}  // namespace phalanx
