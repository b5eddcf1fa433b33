#include "front_forms.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "shapes.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

// One call that is being arranged.
class Arranging {
 public:
  Arranging(const Arguments& arguments, int rank, int size, TensorReader& reader, Arranged& made)
      : arguments_(arguments), rank_(rank), size_(size), reader_(reader), made_(made) {}

  void arrange(Form form);

 private:
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

  void take_root();
  void take_reduction(const TensorView& tensor);
  // Tensors of which the first is outputs[first] belong to the inputs, one to one.
  void check_pairs(const Views& outputs, std::size_t first, const Views& inputs, const std::string& name) const;
  bool is_root() const noexcept { return call().root == rank_; }
  void describe(Op op, const TensorView& tensor, std::int64_t count);
  void describe_shape();
  Description& call() noexcept { return made_.call; }
  const Description& call() const noexcept { return made_.call; }

  const Arguments& arguments_;
  const int rank_;
  const int size_;
  TensorReader& reader_;
  Arranged& made_;
};

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

const TensorView& Arranging::one(Side& side, nb::handle tensor, const char* name, bool written) {
  side.cut = Cut::whole;
  return side.tensors.emplace_back(read_one(reader_, tensor, name, -1, written));
}

void Arranging::several(Side& side, nb::handle list, const char* name, bool written, Py_ssize_t num) {
  read_several(reader_, side.tensors, list, name, written, num);
  side.cut = Cut::whole;
}

void Arranging::take_root() {
  check_root(arguments_.root, size_);
  call().root = static_cast<std::int32_t>(arguments_.root);
}

void Arranging::take_reduction(const TensorView& tensor) {
  if (!reader_.only_describes()) check_reduction(tensor, arguments_.reduce_op, arguments_.factor);
  call().reduce_op = static_cast<std::int8_t>(arguments_.reduce_op);
  call().factor = arguments_.factor;
}

void Arranging::check_pairs(const Views& outputs, std::size_t first, const Views& inputs,
                            const std::string& name) const {
  check_same_length(outputs.size() - first, inputs.size(), name, "inputs");
  for (std::size_t i = 0; i < inputs.size(); ++i) check_dtype(outputs[first + i], inputs[i], entry_of(name, i));
}

void Arranging::describe(Op op, const TensorView& tensor, std::int64_t count) {
  call().op = op;
  call().dtype = tensor.dtype;
  call().unlisted_dtype = tensor.unlisted_dtype;
  call().device = tensor.device;
  call().count = count;
}

void Arranging::all_reduce() {
  const TensorView& tensor = one(made_.in, arguments_.output, "tensor", true);
  take_reduction(tensor);
  made_.writes_input = true;
  describe(Op::all_reduce, tensor, tensor.numel);
}

void Arranging::all_reduce_coalesced() {
  several(made_.in, arguments_.output, "tensors", true);
  const Views& tensors = made_.in.tensors;
  check_dtypes(tensors, tensors[0], "tensors");
  take_reduction(tensors[0]);
  check_apart(reader_, tensors, "tensors");
  made_.writes_input = true;
  describe(Op::all_reduce, tensors[0], sum_of(tensors));
  call().layout = layout_of(tensors, tensors.size());
}

void Arranging::reduce() {
  take_root();
  const TensorView& tensor = one(made_.in, arguments_.output, "tensor", is_root());
  take_reduction(tensor);
  made_.writes_input = is_root();
  describe(Op::reduce, tensor, tensor.numel);
}

void Arranging::broadcast() {
  take_root();
  const TensorView& tensor = one(is_root() ? made_.in : made_.out, arguments_.output, "tensor", !is_root());
  describe(Op::broadcast, tensor, tensor.numel);
}

void Arranging::broadcast_coalesced() {
  take_root();
  Side& side = is_root() ? made_.in : made_.out;
  several(side, arguments_.output, "tensors", !is_root());
  if (!is_root()) check_apart(reader_, side.tensors, "tensors");
  describe(Op::broadcast, side.tensors[0], sum_of(side.tensors));
  call().layout = layout_of(side.tensors, side.tensors.size());
}

void Arranging::all_gather() {
  const TensorView& tensor = one(made_.in, arguments_.input, "tensor", false);
  several(made_.out, arguments_.output, "outputs", true, size_);
  const Views& outputs = made_.out.tensors;
  const auto rank = static_cast<std::size_t>(rank_);
  check_dtypes(outputs, tensor, "outputs");
  if (tensor.numel != outputs[rank].numel) check_size(tensor, outputs[rank].numel, "tensor", entry_of("outputs", rank));
  check_apart(reader_, outputs, "outputs");
  made_.out.cut = Cut::listed;
  describe(Op::all_gather, tensor, sum_of(outputs));
  call().layout = layout_of(outputs, 1);
}

void Arranging::all_gather_single() {
  const TensorView& tensor = one(made_.in, arguments_.input, "tensor", false);
  const TensorView& output = one(made_.out, arguments_.output, "output", true);
  check_dtypes(made_.out.tensors, tensor, "output");
  if (output.numel != tensor.numel * size_) check_product(output, tensor, size_, "output");
  made_.out.cut = Cut::evenly;
  describe(Op::all_gather, tensor, output.numel);
}

void Arranging::all_gather_coalesced() {
  several(made_.in, arguments_.input, "inputs", false);
  const Views& inputs = made_.in.tensors;
  const nb::handle lists = arguments_.output;
  Views& outputs = made_.out.tensors;
  for (std::size_t p = 0; p < static_cast<std::size_t>(size_); ++p) {
    // Reading the list before may have run Python code.
    check_lists(lists, "outputs", size_);
    const std::size_t first = outputs.size();
    const nb::object list = nb::borrow(PySequence_Fast_ITEMS(lists.ptr())[p]);
    several(made_.out, list, entry_of("outputs", p).c_str(), true);
    check_pairs(outputs, first, inputs, entry_of("outputs", p));
  }
  const std::size_t mine = static_cast<std::size_t>(rank_) * inputs.size();
  const std::string own_name = entry_of("outputs", static_cast<std::size_t>(rank_));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_size(inputs[i], outputs[mine + i].numel, entry_of("inputs", i), entry_of(own_name, i));
  }
  check_apart(reader_, outputs, "outputs", inputs.size());
  made_.out.cut = Cut::listed;
  describe(Op::all_gather, inputs[0], sum_of(outputs));
  call().layout = layout_of(outputs, inputs.size());
}

void Arranging::all_gather_single_coalesced() {
  several(made_.in, arguments_.input, "inputs", false);
  several(made_.out, arguments_.output, "outputs", true);
  const Views &inputs = made_.in.tensors, &outputs = made_.out.tensors;
  check_pairs(outputs, 0, inputs, "outputs");
  for (std::size_t i = 0; i < inputs.size(); ++i) check_product(outputs[i], inputs[i], size_, entry_of("outputs", i));
  check_apart(reader_, outputs, "outputs");
  made_.out.cut = Cut::evenly;
  describe(Op::all_gather, inputs[0], sum_of(outputs));
  call().layout = layout_of(inputs, inputs.size());
}

void Arranging::gather() {
  take_root();
  const TensorView& tensor = one(made_.in, arguments_.input, "tensor", false);
  const nb::handle list = arguments_.output;
  if (is_root()) {
    several(made_.out, list, "outputs", true, size_);
    const Views& outputs = made_.out.tensors;
    check_dtypes(outputs, tensor, "outputs");
    for (std::size_t p = 0; p < outputs.size(); ++p) {
      if (outputs[p].numel != tensor.numel) check_size(outputs[p], tensor.numel, entry_of("outputs", p), "tensor");
    }
    check_apart(reader_, outputs, "outputs");
    made_.out.cut = Cut::listed;
  } else {
    check_no_list(list, "outputs");
  }
  describe(Op::gather, tensor, tensor.numel);
}

void Arranging::scatter() {
  take_root();
  const TensorView& output = one(made_.out, arguments_.output, "output", true);
  const nb::handle list = arguments_.input;
  if (is_root()) {
    several(made_.in, list, "inputs", false, size_);
    const Views& inputs = made_.in.tensors;
    check_dtypes(inputs, output, "inputs");
    for (std::size_t p = 0; p < inputs.size(); ++p) {
      if (inputs[p].numel != output.numel) check_size(inputs[p], output.numel, entry_of("inputs", p), "output");
    }
    made_.in.cut = Cut::listed;
  } else {
    check_no_list(list, "inputs");
  }
  describe(Op::scatter, output, output.numel);
}

void Arranging::reduce_scatter() {
  const TensorView& output = one(made_.out, arguments_.output, "output", true);
  several(made_.in, arguments_.input, "inputs", false, size_);
  const Views& inputs = made_.in.tensors;
  const auto rank = static_cast<std::size_t>(rank_);
  check_dtypes(inputs, output, "inputs");
  if (output.numel != inputs[rank].numel) check_size(output, inputs[rank].numel, "output", entry_of("inputs", rank));
  take_reduction(output);
  made_.in.cut = Cut::listed;
  describe(Op::reduce_scatter, output, sum_of(inputs));
  call().layout = layout_of(inputs, 1);
}

void Arranging::reduce_scatter_single() {
  const TensorView& output = one(made_.out, arguments_.output, "output", true);
  const TensorView& tensor = one(made_.in, arguments_.input, "tensor", false);
  check_dtypes(made_.in.tensors, output, "tensor");
  if (tensor.numel != output.numel * size_) check_product(tensor, output, size_, "tensor");
  take_reduction(output);
  made_.in.cut = Cut::evenly;
  describe(Op::reduce_scatter, output, tensor.numel);
}

void Arranging::reduce_scatter_single_coalesced() {
  several(made_.out, arguments_.output, "outputs", true);
  several(made_.in, arguments_.input, "inputs", false);
  const Views &outputs = made_.out.tensors, &inputs = made_.in.tensors;
  check_same_length(inputs.size(), outputs.size(), "inputs", "outputs");
  check_dtypes(outputs, outputs[0], "outputs");
  check_dtypes(inputs, outputs[0], "inputs");
  for (std::size_t i = 0; i < inputs.size(); ++i) check_product(inputs[i], outputs[i], size_, entry_of("inputs", i));
  take_reduction(outputs[0]);
  check_apart(reader_, outputs, "outputs");
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
  check_apart(reader_, outputs, "outputs");
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
  check_splits(rows, splits, size_, name, splits_name);
  if (splits.empty()) {
    side.cut = Cut::evenly;
    return;
  }
  const std::int64_t width = rows > 0 ? tensor.numel / rows : 0;
  side.cut = Cut::sized;
  for (const std::int64_t split : splits) side.sizes.push_back(split * width);
}

// The shape of the one tensor that the count is about; the sizes where elements are divided.
void Arranging::describe_shape() {
  const Side* first = &made_.in;
  const Side* second = &made_.out;
  if (traits_of(call().op).shape_of_outputs) std::swap(first, second);
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
    // The first ones are kept; a list has no hash.
    std::array<std::int64_t, kSizesKept> numels{};
    const std::size_t num = first->tensors.size();
    for (std::size_t i = 0; i < std::min(num, numels.size()); ++i) numels[i] = first->tensors[i].numel;
    call().shape = shape_of(numels.data(), num, true, call().count);
  }
}

void Arranging::arrange(Form form) {
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
}

}  // namespace

void Side::fill(Blocks& blocks, int num_ranks) const {
  blocks.clear();
  const auto num = static_cast<std::size_t>(num_ranks);
  if (cut == Cut::nothing) return;
  if (cut == Cut::sized) {
    Piece piece{tensors[0].data, 0};
    for (const std::int64_t size : sizes) {
      piece.size = static_cast<std::uint64_t>(size) * tensors[0].width;
      blocks.add_block(&piece, 1);
      piece.data += piece.size;
    }
    return;
  }
  if (tensors.size() == 1 || (cut == Cut::listed && tensors.size() == num)) {
    for (const TensorView& tensor : tensors) {
      const Piece piece = tensor.piece();
      cut == Cut::evenly ? blocks.cut(&piece, 1, num) : blocks.add_block(&piece, 1);
    }
    return;
  }
  std::vector<Piece> pieces;
  pieces.reserve(tensors.size());
  for (const TensorView& tensor : tensors) pieces.push_back(tensor.piece());
  if (cut == Cut::evenly) return blocks.cut(pieces.data(), pieces.size(), num);
  const std::size_t num_blocks = cut == Cut::whole ? 1 : num;
  const std::size_t each = pieces.size() / num_blocks;
  for (std::size_t block = 0; block < num_blocks; ++block) blocks.add_block(pieces.data() + block * each, each);
}

void arrange(Form form, const Arguments& arguments, int rank, int size, TensorReader& reader, Arranged& made) {
  Arranging(arguments, rank, size, reader, made).arrange(form);
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
}

}  // namespace phalanx
