#include "front_describe.hpp"

#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "front_calls.hpp"
#include "front_spelled.hpp"
#include "splits.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

// Describes the calls of one method of a group.
class MethodReader {
 public:
  MethodReader(const std::string& name, int rank, int size) : method_(find_method(name)), rank_(rank), size_(size) {
    if (method_ == nullptr) throw std::invalid_argument("no such method of the front: " + name);
  }

  // The description; None where Python has to read the call; the problem where its arguments are wrong.
  nb::object read(const nb::args& args, const nb::kwargs& kwargs) const {
    std::vector<PyObject*> given;
    nb::object names;
    if (kwargs.size() > 0) {
      for (nb::handle arg : args) given.push_back(arg.ptr());
      nb::list listed;
      for (auto [name, value] : kwargs) {
        listed.append(name);
        given.push_back(value.ptr());
      }
      names = nb::tuple(listed);
    }
    PyObject* const* first = given.empty() ? PySequence_Fast_ITEMS(args.ptr()) : given.data();
    SpelledCall spelled(*method_, first, static_cast<Py_ssize_t>(args.size()), names.ptr());
    std::vector<nb::object> held;
    TensorReader reader(Unknown::refuse, held, Reading::to_describe);
    try {
      spelled.read();
      if (spelled.is_message()) return describe_one(spelled, reader);
      Arranged made;
      arrange(*method_->form, spelled.arguments, rank_, size_, reader, made);
      if (spelled.is_async) made.call.flags |= kAsync;
      if (!traits_of(made.call.op).exchanges_sizes) return nb::cast(made.call);
      const auto sent = [&](int peer) { return num_for(made.in, peer); };
      const auto expected = [&](int peer) { return num_for(made.out, peer); };
      return nb::cast(DividedCall{made.call, balance_of(rank_, size_, sent, expected)});
    } catch (const NotPlain&) {
      return nb::none();
    } catch (const UnknownTensor&) {
      return nb::none();
    } catch (Problem& problem) {
      return nb::cast(std::move(problem));
    }
  }

 private:
  // The number of elements for one peer, or from it.
  std::int64_t num_for(const Side& side, int peer) const {
    const auto index = static_cast<std::size_t>(peer);
    if (side.cut == Cut::listed) return side.tensors[index].numel;
    return side.cut == Cut::sized ? side.sizes[index] : side.tensors[0].numel / size_;
  }
  static nb::object describe_one(const SpelledCall& spelled, TensorReader& reader) {
    const TensorView view = reader.read(spelled.tensor.ptr(), "tensor");
    const bool sends = spelled.method().spelling == Spelling::send;
    return nb::cast(
        describe_message(view, sends, static_cast<int>(spelled.peer), static_cast<std::uint32_t>(spelled.tag)));
  }

  const Method* const method_;
  const int rank_;
  const int size_;
};

}  // namespace

void bind_front_describe(nb::module_& module) {
  nb::class_<MethodReader>(module, "MethodReader", "Describes the calls of one method of a group, without making them.")
      .def(nb::init<const std::string&, int, int>(), "name"_a, "rank"_a, "size"_a)
      .def("__call__", &MethodReader::read,
           nb::sig("def __call__(self, *args: object, **kwargs: object) -> Description | Problem | None"),
           "None where Python has to read the call; a problem where the arguments are wrong.");
}

}  // namespace phalanx
