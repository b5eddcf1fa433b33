#include "front_forms.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "kernels.hpp"
#include "shapes.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

// Decide in Python about tensors that are not contiguous. Set once; never destroyed.
MemoryLook& look() {
  static auto* const made = new MemoryLook;
  return *made;
}

nb::object own(nb::handle object) { return nb::borrow(object); }

Problem problem(ProblemKind kind, std::string name, std::int64_t expected = 0, std::int64_t actual = 0,
                std::string other = {}) {
  return {kind, std::move(name), std::move(other), expected, actual, nb::none(), nb::none()};
}

// Of a list or tuple.
Py_ssize_t length_of(nb::handle list, const char* name) {
  if (!PyList_Check(list.ptr()) && !PyTuple_Check(list.ptr())) {
    Problem found = problem(ProblemKind::not_a_list, name);
    found.got = own(list);
    throw found;
  }
  return PySequence_Fast_GET_SIZE(list.ptr());
}

// One call that is being arranged.
class Arranging {
 public:
  Arranging(const Arguments& arguments, int rank, int size, TensorReader& reader)
      : arguments_(arguments), rank_(rank), size_(size), reader_(reader) {}

  Arranged arrange(Form form);

 private:
  using Views = std::vector<TensorView>;
  using Numels = std::vector<std::int64_t>;

  void all_reduce();
  void all_reduce_coalesced();
  void reduce();
  void broadcast();
  void broadcast_coalesced();
  void all_gather();
  void all_gather_single();
  void all_gather_coalesced();
  void all_gather_single_coalesced();
  void gather();
  void scatter();
  void reduce_scatter();
  void reduce_scatter_single();
  void reduce_scatter_single_coalesced();
  void all_to_all();
  void all_to_all_single();

  const TensorView& one(Side& side, nb::handle tensor, const char* name, bool written);
  // `num`: -1 for any number but none. The side may have tensors already: of other lists.
  void several(Side& side, nb::handle list, const char* name, bool written, Py_ssize_t num = -1);
  void cut_by_rows(Side& side, const std::vector<std::int64_t>& splits, const char* name, const char* splits_name);
  std::int64_t own_numel(const Side& side) const;

  void check_root();
  void check_reduction(const TensorView& tensor);
  void check_apart(const Views& tensors, const char* name, std::size_t per_rank = 0) const;
  void check_dtype(const TensorView& tensor, const TensorView& like, const std::string& name) const;
  void check_dtypes(const Views& tensors, const TensorView& like, const char* name) const;
  void check_size(const TensorView& tensor, std::int64_t expected, const std::string& name, std::string other) const;
  void check_product(const TensorView& tensor, const TensorView& part, const std::string& name) const;
  void check_own(std::int64_t sent, std::int64_t received) const;
  void check_pairs(const Views& outputs, std::size_t first, const Views& inputs, const std::string& name) const;

  bool is_root() const noexcept { return call().root == rank_; }
  std::string at(const char* name, std::size_t index) const {
    return argument_name(name, static_cast<Py_ssize_t>(index));
  }
  void describe(Op op, const TensorView& tensor, std::int64_t count);
  void describe_shape();
  Description& call() noexcept { return made_.call; }
  const Description& call() const noexcept { return made_.call; }

  const Arguments& arguments_;
  const int rank_;
  const int size_;
  TensorReader& reader_;
  Arranged made_;
};

constexpr std::uint64_t kMultiplier = 0xff51afd7ed558ccd;

std::uint64_t hash_on(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * kMultiplier;
  return hash ^ hash >> 32;
}

std::int64_t sum_of(const std::vector<TensorView>& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), std::int64_t{0},
                         [](std::int64_t sum, const TensorView& tensor) { return sum + tensor.numel; });
}

// How elements are divided: `each` tensors per block. 0 for equal blocks of one tensor each, so that the spellings of
// an op agree with each other. The dtypes of a block count where they differ.
std::uint32_t layout_of(const std::vector<TensorView>& tensors, std::size_t each) {
  bool even = true, alike = true;
  for (std::size_t i = 0; i < tensors.size(); ++i) even = even && tensors[i].numel == tensors[i % each].numel;
  if (even && each == 1) return 0;
  for (std::size_t i = 0; i < each; ++i) {
    alike = alike && tensors[i].dtype == tensors[0].dtype && tensors[i].unlisted_dtype == tensors[0].unlisted_dtype;
  }
  std::uint64_t hash = hash_on(each, even ? 1 : 2);
  for (std::size_t i = 0; i < (even ? each : tensors.size()); ++i) {
    hash = hash_on(hash, static_cast<std::uint64_t>(tensors[i].numel));
  }
  for (std::size_t i = 0; !alike && i < each; ++i) {
    hash = hash_on(hash, static_cast<std::uint64_t>(tensors[i].dtype) << 32 | tensors[i].unlisted_dtype);
  }
  return static_cast<std::uint32_t>(hash) | 1;
}

TensorView read_one(TensorReader& reader, nb::handle tensor, const char* name, Py_ssize_t index, bool written) {
  const TensorView view = reader.read(tensor.ptr(), name, index);
  if (written && !view.contiguous && nb::cast<bool>(look().overlaps_itself(tensor))) {
    Problem found = problem(ProblemKind::overlaps_self, argument_name(name, index));
    found.got = own(tensor);
    throw found;
  }
  return view;
}

const TensorView& Arranging::one(Side& side, nb::handle tensor, const char* name, bool written) {
  side.cut = Cut::whole;
  return side.tensors.emplace_back(read_one(reader_, tensor, name, -1, written));
}

void read_several(TensorReader& reader, std::vector<TensorView>& tensors, nb::handle list, const char* name,
                  bool written, std::int64_t num) {
  const Py_ssize_t length = length_of(list, name);
  if (num >= 0 && length != num) throw problem(ProblemKind::wrong_length, name, num, length);
  if (length == 0) throw problem(ProblemKind::empty_list, name);
  tensors.reserve(tensors.size() + static_cast<std::size_t>(length));
  for (Py_ssize_t i = 0; i < length; ++i) {
    // Reading may run Python code, which may change the list.
    if (PySequence_Fast_GET_SIZE(list.ptr()) != length) throw UnknownTensor{};
    const nb::object tensor = own(PySequence_Fast_ITEMS(list.ptr())[i]);
    tensors.push_back(read_one(reader, tensor, name, i, written));
  }
}

void Arranging::several(Side& side, nb::handle list, const char* name, bool written, Py_ssize_t num) {
  read_several(reader_, side.tensors, list, name, written, num);
  side.cut = Cut::whole;
}

void Arranging::check_root() {
  if (arguments_.root < 0 || arguments_.root >= size_) throw problem(ProblemKind::wrong_root, "root");
  call().root = static_cast<std::int32_t>(arguments_.root);
}

void Arranging::check_reduction(const TensorView& tensor) {
  const int reduce_op = arguments_.reduce_op;
  const bool is_op = reduce_op >= 0 && reduce_op < static_cast<int>(kNumReduceOps);
  bool fits = is_op && reduce_kernel(tensor.dtype, static_cast<ReduceOp>(reduce_op)) != nullptr;
  if (fits && static_cast<ReduceOp>(reduce_op) == ReduceOp::premul_sum) {
    const bool integral = tensor.dtype >= DType::boolean && tensor.dtype <= DType::int64;
    const double factor = arguments_.factor;
    fits = !integral || (std::nearbyint(factor) == factor && factor >= -0x1p63 && factor < 0x1p64);
  }
  if (!fits) {
    Problem found = problem(ProblemKind::no_reduction, "tensor");
    found.got = own(tensor.object);
    throw found;
  }
  call().reduce_op = static_cast<std::int8_t>(reduce_op);
  call().factor = arguments_.factor;
}

// `per_rank` tensors belong to each rank, where that is not 0: they are named by two indices.
void Arranging::check_apart(const Views& tensors, const char* name, std::size_t per_rank) const {
  if (tensors.size() < 2) return;
  std::vector<std::pair<const std::byte*, const std::byte*>> extents;
  bool contiguous = true;
  for (const TensorView& tensor : tensors) {
    contiguous = contiguous && tensor.contiguous;
    if (tensor.data != nullptr && tensor.numel > 0) extents.emplace_back(tensor.data, tensor.data + tensor.bytes());
  }
  std::sort(extents.begin(), extents.end());
  const auto meet = [](const auto& before, const auto& after) { return after.first < before.second; };
  if (contiguous && std::adjacent_find(extents.begin(), extents.end(), meet) == extents.end()) return;
  nb::list objects;
  for (const TensorView& tensor : tensors) objects.append(nb::handle(tensor.object));
  const nb::object shared = look().find_shared(objects);
  if (shared.is_none()) return;
  const auto name_of = [&](std::size_t index) {
    return per_rank == 0 ? at(name, index) : at(at(name, index / per_rank).c_str(), index % per_rank);
  };
  throw problem(ProblemKind::overlaps, name_of(nb::cast<std::size_t>(shared[0])), 0, 0,
                name_of(nb::cast<std::size_t>(shared[1])));
}

void Arranging::check_dtype(const TensorView& tensor, const TensorView& like, const std::string& name) const {
  if (tensor.dtype == like.dtype && tensor.unlisted_dtype == like.unlisted_dtype) return;
  Problem found = problem(ProblemKind::wrong_dtype, name);
  found.got = own(tensor.object);
  found.like = own(like.object);
  throw found;
}

void Arranging::check_dtypes(const Views& tensors, const TensorView& like, const char* name) const {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].dtype != like.dtype || tensors[i].unlisted_dtype != like.unlisted_dtype) {
      check_dtype(tensors[i], like, tensors.size() > 1 ? at(name, i) : name);
    }
  }
}

void Arranging::check_size(const TensorView& tensor, std::int64_t expected, const std::string& name,
                           std::string other) const {
  if (tensor.numel != expected) {
    throw problem(ProblemKind::wrong_size, name, expected, tensor.numel, std::move(other));
  }
}

void Arranging::check_product(const TensorView& tensor, const TensorView& part, const std::string& name) const {
  const std::int64_t expected = part.numel * size_;
  if (tensor.numel != expected) throw problem(ProblemKind::wrong_product, name, expected, tensor.numel);
}

void Arranging::check_own(std::int64_t sent, std::int64_t received) const {
  if (sent != received) throw problem(ProblemKind::wrong_own, "", received, sent);
}

// Tensors of which the first is outputs[first] belong to the inputs, one to one.
void Arranging::check_pairs(const Views& outputs, std::size_t first, const Views& inputs,
                            const std::string& name) const {
  const std::size_t num = outputs.size() - first;
  if (num != inputs.size()) {
    throw problem(ProblemKind::unlike_length, name, static_cast<std::int64_t>(inputs.size()),
                  static_cast<std::int64_t>(num), "inputs");
  }
  for (std::size_t i = 0; i < num; ++i) check_dtype(outputs[first + i], inputs[i], at(name.c_str(), i));
}

void Arranging::describe(Op op, const TensorView& tensor, std::int64_t count) {
  call().op = op;
  call().dtype = tensor.dtype;
  call().unlisted_dtype = tensor.unlisted_dtype;
  call().device = Device::cpu;
  call().count = count;
}

void Arranging::all_reduce() {
  const TensorView& tensor = one(made_.in, arguments_.output, "tensor", true);
  check_reduction(tensor);
  made_.writes_input = true;
  describe(Op::all_reduce, tensor, tensor.numel);
}

void Arranging::all_reduce_coalesced() {
  several(made_.in, arguments_.output, "tensors", true);
  const Views& tensors = made_.in.tensors;
  check_dtypes(tensors, tensors[0], "tensors");
  check_reduction(tensors[0]);
  check_apart(tensors, "tensors");
  made_.writes_input = true;
  describe(Op::all_reduce, tensors[0], sum_of(tensors));
  call().layout = layout_of(tensors, tensors.size());
}

void Arranging::reduce() {
  check_root();
  const TensorView& tensor = one(made_.in, arguments_.output, "tensor", is_root());
  check_reduction(tensor);
  made_.writes_input = is_root();
  describe(Op::reduce, tensor, tensor.numel);
}

void Arranging::broadcast() {
  check_root();
  const TensorView& tensor = one(is_root() ? made_.in : made_.out, arguments_.output, "tensor", !is_root());
  describe(Op::broadcast, tensor, tensor.numel);
}

void Arranging::broadcast_coalesced() {
  check_root();
  Side& side = is_root() ? made_.in : made_.out;
  several(side, arguments_.output, "tensors", !is_root());
  if (!is_root()) check_apart(side.tensors, "tensors");
  describe(Op::broadcast, side.tensors[0], sum_of(side.tensors));
  call().layout = layout_of(side.tensors, side.tensors.size());
}

void Arranging::all_gather() {
  const TensorView& tensor = one(made_.in, arguments_.input, "tensor", false);
  several(made_.out, arguments_.output, "outputs", true, size_);
  const Views& outputs = made_.out.tensors;
  const auto rank = static_cast<std::size_t>(rank_);
  check_dtypes(outputs, tensor, "outputs");
  if (tensor.numel != outputs[rank].numel) check_size(tensor, outputs[rank].numel, "tensor", at("outputs", rank));
  check_apart(outputs, "outputs");
  made_.out.cut = Cut::listed;
  describe(Op::all_gather, tensor, sum_of(outputs));
  call().layout = layout_of(outputs, 1);
}

void Arranging::all_gather_single() {
  const TensorView& tensor = one(made_.in, arguments_.input, "tensor", false);
  const TensorView& output = one(made_.out, arguments_.output, "output", true);
  check_dtypes(made_.out.tensors, tensor, "output");
  if (output.numel != tensor.numel * size_) check_product(output, tensor, "output");
  made_.out.cut = Cut::evenly;
  describe(Op::all_gather, tensor, output.numel);
}

void Arranging::all_gather_coalesced() {
  several(made_.in, arguments_.input, "inputs", false);
  const Views& inputs = made_.in.tensors;
  const nb::handle lists = arguments_.output;
  const bool is_list = PyList_Check(lists.ptr()) || PyTuple_Check(lists.ptr());
  if (!is_list || PySequence_Fast_GET_SIZE(lists.ptr()) != size_) {
    Problem found = problem(ProblemKind::no_lists, "outputs", size_);
    found.got = own(lists);
    throw found;
  }
  Views& outputs = made_.out.tensors;
  for (std::size_t p = 0; p < static_cast<std::size_t>(size_); ++p) {
    const std::size_t first = outputs.size();
    const nb::object list = own(PySequence_Fast_ITEMS(lists.ptr())[p]);
    several(made_.out, list, at("outputs", p).c_str(), true);
    check_pairs(outputs, first, inputs, at("outputs", p));
  }
  const std::size_t mine = static_cast<std::size_t>(rank_) * inputs.size();
  const std::string own_name = at("outputs", static_cast<std::size_t>(rank_));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_size(inputs[i], outputs[mine + i].numel, at("inputs", i), at(own_name.c_str(), i));
  }
  check_apart(outputs, "outputs", inputs.size());
  made_.out.cut = Cut::listed;
  describe(Op::all_gather, inputs[0], sum_of(outputs));
  call().layout = layout_of(outputs, inputs.size());
}

void Arranging::all_gather_single_coalesced() {
  several(made_.in, arguments_.input, "inputs", false);
  several(made_.out, arguments_.output, "outputs", true);
  const Views &inputs = made_.in.tensors, &outputs = made_.out.tensors;
  check_pairs(outputs, 0, inputs, "outputs");
  for (std::size_t i = 0; i < inputs.size(); ++i) check_product(outputs[i], inputs[i], at("outputs", i));
  check_apart(outputs, "outputs");
  made_.out.cut = Cut::evenly;
  describe(Op::all_gather, inputs[0], sum_of(outputs));
  call().layout = layout_of(inputs, inputs.size());
}

void Arranging::gather() {
  check_root();
  const TensorView& tensor = one(made_.in, arguments_.input, "tensor", false);
  const nb::handle list = arguments_.output;
  if (is_root()) {
    several(made_.out, list, "outputs", true, size_);
    const Views& outputs = made_.out.tensors;
    check_dtypes(outputs, tensor, "outputs");
    for (std::size_t p = 0; p < outputs.size(); ++p) {
      if (outputs[p].numel != tensor.numel) check_size(outputs[p], tensor.numel, at("outputs", p), "tensor");
    }
    check_apart(outputs, "outputs");
    made_.out.cut = Cut::listed;
  } else if (list.is_valid() && !list.is_none()) {
    const Py_ssize_t num = length_of(list, "outputs");
    if (num > 0) throw problem(ProblemKind::not_the_root, "outputs", 0, num);
  }
  describe(Op::gather, tensor, tensor.numel);
}

void Arranging::scatter() {
  check_root();
  const TensorView& output = one(made_.out, arguments_.output, "output", true);
  const nb::handle list = arguments_.input;
  if (is_root()) {
    several(made_.in, list, "inputs", false, size_);
    const Views& inputs = made_.in.tensors;
    check_dtypes(inputs, output, "inputs");
    for (std::size_t p = 0; p < inputs.size(); ++p) {
      if (inputs[p].numel != output.numel) check_size(inputs[p], output.numel, at("inputs", p), "output");
    }
    made_.in.cut = Cut::listed;
  } else if (list.is_valid() && !list.is_none()) {
    const Py_ssize_t num = length_of(list, "inputs");
    if (num > 0) throw problem(ProblemKind::not_the_root, "inputs", 0, num);
  }
  describe(Op::scatter, output, output.numel);
}

void Arranging::reduce_scatter() {
  const TensorView& output = one(made_.out, arguments_.output, "output", true);
  several(made_.in, arguments_.input, "inputs", false, size_);
  const Views& inputs = made_.in.tensors;
  const auto rank = static_cast<std::size_t>(rank_);
  check_dtypes(inputs, output, "inputs");
  if (output.numel != inputs[rank].numel) check_size(output, inputs[rank].numel, "output", at("inputs", rank));
  check_reduction(output);
  made_.in.cut = Cut::listed;
  describe(Op::reduce_scatter, output, sum_of(inputs));
  call().layout = layout_of(inputs, 1);
}

void Arranging::reduce_scatter_single() {
  const TensorView& output = one(made_.out, arguments_.output, "output", true);
  const TensorView& tensor = one(made_.in, arguments_.input, "tensor", false);
  check_dtypes(made_.in.tensors, output, "tensor");
  if (tensor.numel != output.numel * size_) check_product(tensor, output, "tensor");
  check_reduction(output);
  made_.in.cut = Cut::evenly;
  describe(Op::reduce_scatter, output, tensor.numel);
}

void Arranging::reduce_scatter_single_coalesced() {
  several(made_.out, arguments_.output, "outputs", true);
  several(made_.in, arguments_.input, "inputs", false);
  const Views &outputs = made_.out.tensors, &inputs = made_.in.tensors;
  if (outputs.size() != inputs.size()) {
    throw problem(ProblemKind::unlike_length, "inputs", static_cast<std::int64_t>(outputs.size()),
                  static_cast<std::int64_t>(inputs.size()), "outputs");
  }
  check_dtypes(outputs, outputs[0], "outputs");
  check_dtypes(inputs, outputs[0], "inputs");
  for (std::size_t i = 0; i < inputs.size(); ++i) check_product(inputs[i], outputs[i], at("inputs", i));
  check_reduction(outputs[0]);
  check_apart(outputs, "outputs");
  made_.in.cut = Cut::evenly;
  describe(Op::reduce_scatter, outputs[0], sum_of(inputs));
  call().layout = layout_of(outputs, outputs.size());
}

void Arranging::all_to_all() {
  several(made_.out, arguments_.output, "outputs", true, size_);
  several(made_.in, arguments_.input, "inputs", false, size_);
  const Views &outputs = made_.out.tensors, &inputs = made_.in.tensors;
  const auto rank = static_cast<std::size_t>(rank_);
  check_dtypes(inputs, inputs[0], "inputs");
  check_dtypes(outputs, inputs[0], "outputs");
  check_own(inputs[rank].numel, outputs[rank].numel);
  check_apart(outputs, "outputs");
  made_.in.cut = made_.out.cut = Cut::listed;
  describe(Op::all_to_all, inputs[0], kAnyCount);
}

void Arranging::all_to_all_single() {
  one(made_.out, arguments_.output, "output", true);
  const TensorView& tensor = one(made_.in, arguments_.input, "tensor", false);
  check_dtypes(made_.out.tensors, tensor, "output");
  cut_by_rows(made_.in, arguments_.input_splits, "tensor", "input_split_sizes");
  cut_by_rows(made_.out, arguments_.output_splits, "output", "output_split_sizes");
  check_own(own_numel(made_.in), own_numel(made_.out));
  describe(Op::all_to_all, tensor, kAnyCount);
}

std::int64_t Arranging::own_numel(const Side& side) const {
  return side.cut == Cut::evenly ? side.tensors[0].numel / size_ : side.sizes[static_cast<std::size_t>(rank_)];
}

// Splits are numbers of rows of dimension 0, one per rank.
void Arranging::cut_by_rows(Side& side, const std::vector<std::int64_t>& splits, const char* name,
                            const char* splits_name) {
  const TensorView& tensor = side.tensors[0];
  const std::int64_t rows = tensor.ndim > 0 ? tensor.shape[0] : 1;
  if (splits.empty()) {
    if (rows % size_ != 0) throw problem(ProblemKind::wrong_rows, name, 0, rows, splits_name);
    side.cut = Cut::evenly;
    return;
  }
  if (splits.size() != static_cast<std::size_t>(size_)) {
    throw problem(ProblemKind::wrong_splits, splits_name, size_, static_cast<std::int64_t>(splits.size()));
  }
  std::int64_t rest = rows;
  bool is_negative = false;
  for (const std::int64_t split : splits) {
    is_negative = is_negative || split < 0;
    rest = is_negative || split > rest ? -1 : rest - split;
    if (rest < 0) break;
  }
  if (rest != 0) {
    Problem found = problem(ProblemKind::wrong_sum, splits_name, rows, 0, name);
    found.got = nb::cast(splits);
    throw found;
  }
  const std::int64_t width = rows > 0 ? tensor.numel / rows : 0;
  side.cut = Cut::sized;
  for (const std::int64_t split : splits) side.sizes.push_back(split * width);
}

// The shape of the one tensor that the count is about; the sizes where elements are divided.
void Arranging::describe_shape() {
  const Side* first = &made_.in;
  const Side* second = &made_.out;
  if (traits_of(call().op).counts_outputs) std::swap(first, second);
  const auto is_divided = [](const Side& side) { return side.cut == Cut::sized || side.tensors.size() > 1; };
  const bool wants_divided = call().layout != 0 || call().count == kAnyCount;
  if (first->cut == Cut::nothing ||
      (wants_divided && second->cut != Cut::nothing && !is_divided(*first) && is_divided(*second))) {
    first = second;
  }
  if (first->cut == Cut::nothing) return;
  if (first->cut == Cut::sized) {
    call().shape = shape_of(first->sizes.data(), first->sizes.size(), true, call().count);
  } else if (first->tensors.size() == 1 && call().layout == 0) {
    const TensorView& tensor = first->tensors[0];
    call().shape = shape_of(tensor.shape, static_cast<std::size_t>(tensor.ndim), false, call().count);
  } else {
    Numels numels;
    for (const TensorView& tensor : first->tensors) numels.push_back(tensor.numel);
    call().shape = shape_of(numels.data(), numels.size(), true, call().count);
  }
}

Arranged Arranging::arrange(Form form) {
  switch (form) {
    case Form::barrier:
      break;
    case Form::all_reduce:
      all_reduce();
      break;
    case Form::all_reduce_coalesced:
      all_reduce_coalesced();
      break;
    case Form::reduce:
      reduce();
      break;
    case Form::broadcast:
      broadcast();
      break;
    case Form::broadcast_coalesced:
      broadcast_coalesced();
      break;
    case Form::all_gather:
      all_gather();
      break;
    case Form::all_gather_single:
      all_gather_single();
      break;
    case Form::all_gather_coalesced:
      all_gather_coalesced();
      break;
    case Form::all_gather_single_coalesced:
      all_gather_single_coalesced();
      break;
    case Form::gather:
      gather();
      break;
    case Form::scatter:
      scatter();
      break;
    case Form::reduce_scatter:
      reduce_scatter();
      break;
    case Form::reduce_scatter_single:
      reduce_scatter_single();
      break;
    case Form::reduce_scatter_single_coalesced:
      reduce_scatter_single_coalesced();
      break;
    case Form::all_to_all:
      all_to_all();
      break;
    case Form::all_to_all_single:
      all_to_all_single();
      break;
  }
  describe_shape();
  return std::move(made_);
}

}  // namespace

void Side::fill(Blocks& blocks, int num_ranks) const {
  blocks.clear();
  if (cut == Cut::nothing) return;
  const auto num = static_cast<std::size_t>(num_ranks);
  std::vector<Piece> pieces;
  pieces.reserve(cut == Cut::sized ? sizes.size() : tensors.size());
  if (cut == Cut::sized) {
    std::byte* data = tensors[0].data;
    for (const std::int64_t size : sizes) {
      pieces.push_back({data, static_cast<std::uint64_t>(size) * tensors[0].width});
      data += pieces.back().size;
    }
  } else {
    for (const TensorView& tensor : tensors) pieces.push_back(tensor.piece());
  }
  if (cut == Cut::evenly) return blocks.cut(pieces, num);
  const std::size_t num_blocks = cut == Cut::whole ? 1 : num;
  const std::size_t each = pieces.size() / num_blocks;
  for (std::size_t block = 0; block < num_blocks; ++block) blocks.add_block(pieces.data() + block * each, each);
}

Arranged arrange(Form form, const Arguments& arguments, int rank, int size, TensorReader& reader) {
  return Arranging(arguments, rank, size, reader).arrange(form);
}

TensorView check_one(TensorReader& reader, nb::handle tensor, const char* name, bool written) {
  return read_one(reader, tensor, name, -1, written);
}

void check_list(TensorReader& reader, nb::handle list, const char* name, std::int64_t num) {
  std::vector<TensorView> tensors;
  read_several(reader, tensors, list, name, false, num);
}

void bind_forms(nb::module_& module) {
  nb::enum_<Form>(module, "Form", "One of torch's ways to make a collective.")
      .value("barrier", Form::barrier)
      .value("all_reduce", Form::all_reduce)
      .value("all_reduce_coalesced", Form::all_reduce_coalesced)
      .value("reduce", Form::reduce)
      .value("broadcast", Form::broadcast)
      .value("broadcast_coalesced", Form::broadcast_coalesced)
      .value("all_gather", Form::all_gather)
      .value("all_gather_single", Form::all_gather_single)
      .value("all_gather_coalesced", Form::all_gather_coalesced)
      .value("all_gather_single_coalesced", Form::all_gather_single_coalesced)
      .value("gather", Form::gather)
      .value("scatter", Form::scatter)
      .value("reduce_scatter", Form::reduce_scatter)
      .value("reduce_scatter_single", Form::reduce_scatter_single)
      .value("reduce_scatter_single_coalesced", Form::reduce_scatter_single_coalesced)
      .value("all_to_all", Form::all_to_all)
      .value("all_to_all_single", Form::all_to_all_single);
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
        // For good.
        look() = {overlaps_itself.release(), find_shared.release()};
      },
      nb::arg("overlaps_itself"), nb::arg("find_shared"),
      "Who decides about tensors that are not contiguous: whether elements share memory, and which tensors do.");
}

}  // namespace phalanx
