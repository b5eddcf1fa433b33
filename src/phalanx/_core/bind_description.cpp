#include "bind_description.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind_origin.hpp"
#include "layout.hpp"
#include "results.hpp"
#include "splits.hpp"
#include "waiting.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

Op op_named(std::string_view name) {
  for (std::size_t number = 0; number < kOps.size(); ++number) {
    if (kOps[number].name == name) return static_cast<Op>(number);
  }
  throw std::invalid_argument("unknown op");
}

using SizesKept = nb::typed<nb::tuple, std::uint32_t, nb::ellipsis>;

SizesKept sizes_kept(const Shape& shape) {
  nb::list sizes;
  for (std::size_t i = 0; i < std::min<std::size_t>(shape.num, kSizesKept); ++i) sizes.append(shape.sizes[i]);
  return SizesKept(nb::tuple(sizes));
}

std::vector<int> missing_of(const Failure& failure) {
  std::vector<int> missing;
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if ((failure.missing[rank / 64] >> rank % 64 & 1) != 0) missing.push_back(rank);
  }
  return missing;
}

template <std::size_t kSize>
nb::str text_of(const char (&text)[kSize]) {
  return nb::str(text);
}

template <class T>
std::optional<T> given(bool is_given, const T& value) {
  return is_given ? std::optional<T>(value) : std::nullopt;
}

void bind_call(nb::module_& module) {
  nb::class_<Shape>(module, "Shape", "Sizes of a tensor (given as a tuple), or of the tensors of a list.")
      .def(
          "__init__",
          [](Shape* self, nb::handle sizes, std::int64_t count) { new (self) Shape(shape_of(sizes, count)); },
          "sizes"_a, "count"_a = 0)
      .def_ro("num", &Shape::num)
      .def_ro("listed", &Shape::listed)
      .def_prop_ro("sizes", &sizes_kept, "The first of them.")
      .def_prop_ro(
          "may_differ", [](const Shape& self) { return self.hash == 0; }, "Whether ranks may differ in it.")
      .def(
          "__eq__", [](const Shape& self, const Shape& other) { return self == other; }, nb::is_operator(),
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](const Shape& self) {
        return nb::hash(nb::make_tuple(self.listed, self.num, self.hash, sizes_kept(self)));
      });

  nb::class_<Description>(module, "Description", "What a call is, as all ranks know it.")
      .def(
          "__init__",
          [](Description* self, std::string_view op, int reduce_op, int dtype, std::uint32_t unlisted_dtype, int root,
             std::int64_t count, std::uint32_t layout, nb::handle sizes, int peer, std::uint32_t tag, int flags,
             int device) {
            if (dtype < 0 || dtype > static_cast<int>(DType::other)) throw std::invalid_argument("unknown dtype");
            Description call;
            call.op = op_named(op);
            call.reduce_op = static_cast<std::int8_t>(reduce_op);
            call.dtype = static_cast<DType>(dtype);
            call.unlisted_dtype = unlisted_dtype;
            call.root = root;
            call.count = count;
            call.layout = layout;
            call.shape = shape_of(sizes, count);
            call.peer = peer;
            call.tag = tag;
            call.flags = static_cast<std::uint8_t>(flags);
            call.device = static_cast<Device>(device);
            new (self) Description(call);
          },
          "op"_a, nb::kw_only(), "reduce_op"_a = static_cast<int>(kNoReduceOp), "dtype"_a = 0, "unlisted_dtype"_a = 0,
          "root"_a = kNoRank, "count"_a = 0, "layout"_a = 0, "sizes"_a = nb::tuple(), "peer"_a = kNoRank, "tag"_a = 0,
          "flags"_a = 0, "device"_a = 0)
      .def_prop_ro("op", [](const Description& self) { return traits_of(self.op).name; })
      .def_prop_ro("reduce_op", [](const Description& self) { return static_cast<int>(self.reduce_op); })
      .def_prop_ro("device", [](const Description& self) { return static_cast<int>(self.device); })
      .def_prop_ro("dtype", [](const Description& self) { return static_cast<int>(self.dtype); })
      .def_ro("unlisted_dtype", &Description::unlisted_dtype)
      .def_ro("root", &Description::root)
      .def_ro("count", &Description::count)
      .def_ro("layout", &Description::layout)
      .def_ro("shape", &Description::shape)
      .def_ro("peer", &Description::peer)
      .def_ro("tag", &Description::tag)
      .def_ro("flags", &Description::flags)
      .def_ro("factor", &Description::factor)
      .def(
          "with_flags",
          [](const Description& self, int flags) {
            Description call = self;
            call.flags = static_cast<std::uint8_t>(flags);
            return call;
          },
          "flags"_a, "The same call, come another way.")
      .def(
          "with_device",
          [](const Description& self, int device) {
            Description call = self;
            call.device = static_cast<Device>(device);
            return call;
          },
          "device"_a, "The same call, with tensors of this device.")
      .def(
          "with_peer",
          [](const Description& self, int peer) {
            Description call = self;
            call.peer = peer;
            return call;
          },
          "peer"_a, "The same message, with this peer.")
      .def("agrees_with", &agrees, "other"_a, "Whether the two are the same call, whatever the shape is.")
      .def(
          "fits",
          [](const Description& self, const Description& other) { return content_of(self) == content_of(other); },
          "receive"_a, "Of a message: whether it has the dtype and number of elements that are received.");
}

void bind_witness(nb::module_& module) {
  nb::class_<DividedCall, Description>(module, "DividedCall", "A call in which ranks exchange sizes pair by pair.")
      .def_ro("balance", &DividedCall::balance);
  nb::class_<MadeCall>(module, "MadeCall", "A call that a rank has made.")
      .def(
          "__init__",
          [](MadeCall* self, const Description& description, std::uint64_t seq, std::uint64_t result,
             std::string_view where) {
            MadeCall call{seq, result, description, {}};
            copy_text(call.where, where);
            new (self) MadeCall(call);
          },
          "description"_a, nb::kw_only(), "seq"_a, "result"_a = 0, "where"_a = "")
      .def_ro("description", &MadeCall::description)
      .def_ro("seq", &MadeCall::seq)
      .def_ro("result", &MadeCall::result, "Of what the call before gave, where that is compared.")
      .def_prop_ro("where", [](const MadeCall& self) { return text_of(self.where); });

  nb::class_<Testimony>(module, "Testimony", "What the finder of a mismatch saw of a rank.")
      .def(
          "__init__",
          [](Testimony* self, const std::optional<MadeCall>& call, const std::optional<MadeCall>& completed,
             std::string_view refused, std::uint64_t posted) {
            Testimony testimony{call.value_or(MadeCall{}), completed.value_or(MadeCall{}), posted, {}};
            copy_text(testimony.refused, refused);
            new (self) Testimony(testimony);
          },
          nb::kw_only(), "call"_a.none() = nb::none(), "completed"_a.none() = nb::none(), "refused"_a = "",
          "posted"_a = 0)
      .def_prop_ro(
          "call", [](const Testimony& self) { return given(self.call.seq != 0, self.call); },
          "None: the rank had not made it.")
      .def_prop_ro(
          "completed", [](const Testimony& self) { return given(self.completed.seq != 0, self.completed); },
          "The last call that ended well there.")
      .def_ro("posted", &Testimony::posted, "Where the group only posts: the last call that the rank had posted.")
      .def_prop_ro(
          "refused", [](const Testimony& self) { return text_of(self.refused); },
          "The last call of the kind that the rank had refused.");

  nb::class_<ShapeNote::Side>(module, "ShapeSide")
      .def(
          "__init__",
          [](ShapeNote::Side* self, int rank, const Shape& shape, std::string where) {
            new (self) ShapeNote::Side{rank, shape, std::move(where)};
          },
          nb::kw_only(), "rank"_a, "shape"_a, "where"_a)
      .def_ro("rank", &ShapeNote::Side::rank)
      .def_ro("shape", &ShapeNote::Side::shape)
      .def_ro("where", &ShapeNote::Side::where);
  nb::class_<ShapeNote>(module, "ShapeNote", "Two ranks whose calls agree but for the shape of a tensor.")
      .def(
          "__init__",
          [](ShapeNote* self, std::string_view op, std::uint64_t seq, const ShapeNote::Side& one,
             const ShapeNote::Side& other) { new (self) ShapeNote{seq, op_named(op), {one, other}}; },
          nb::kw_only(), "op"_a, "seq"_a, "one"_a, "other"_a)
      .def_prop_ro("op", [](const ShapeNote& self) { return traits_of(self.op).name; })
      .def_ro("seq", &ShapeNote::seq)
      .def_prop_ro("sides", [](const ShapeNote& self) {
        return nb::typed<nb::tuple, ShapeNote::Side, ShapeNote::Side>(nb::make_tuple(self.sides[0], self.sides[1]));
      });
}

// Bytes of blocks, by rank and block.
using Sizes = std::vector<std::vector<std::int64_t>>;

std::optional<Splits> find_in(const Sizes& sent, const Sizes& expected) {
  const auto has_all = [&](const auto& sizes) { return sizes.size() == sent.size(); };
  if (!has_all(expected) || !std::all_of(sent.begin(), sent.end(), has_all) ||
      !std::all_of(expected.begin(), expected.end(), has_all)) {
    throw std::invalid_argument("expected a size per rank and peer");
  }
  const auto at = [](const Sizes& sizes, int rank, int peer) {
    return sizes[static_cast<std::size_t>(rank)][static_cast<std::size_t>(peer)];
  };
  return find_splits(
      static_cast<int>(sent.size()), [&](int from, int to) { return at(sent, from, to); },
      [&](int from, int to) { return at(expected, to, from); });
}

// Addresses and bytes of tensors, one after another.
using Memory = std::vector<std::pair<std::uintptr_t, std::uint64_t>>;

Blocks to_blocks(const Memory& memory) {
  std::vector<Piece> pieces;
  for (const auto& [address, size] : memory) pieces.push_back({reinterpret_cast<std::byte*>(address), size});
  Blocks blocks;
  if (!pieces.empty()) blocks.add_block(pieces.data(), pieces.size());
  return blocks;
}

void bind_result(nb::module_& module) {
  module.def(
      "hash_of_result",
      [](std::string_view op, const Memory& inputs, const Memory& outputs) {
        return hash_of_result(op_named(op), to_blocks(inputs), to_blocks(outputs));
      },
      "op"_a, "inputs"_a, "outputs"_a,
      "Of what must be equal on all ranks when a call has ended, in tensors given by address and bytes; 0 for other "
      "ops.");
}

void bind_failure(nb::module_& module) {
  nb::class_<Misfit>(module, "Misfit", "The message that does not fit the receive of the failure's finder.")
      .def(
          "__init__",
          [](Misfit* self, const Description& sent, std::string_view where) {
            Misfit misfit{sent, {}};
            copy_text(misfit.where, where);
            new (self) Misfit(misfit);
          },
          nb::kw_only(), "sent"_a, "where"_a)
      .def_ro("sent", &Misfit::sent)
      .def_prop_ro("where", [](const Misfit& self) { return text_of(self.where); })
      .def_ro("fitting_seq", &Misfit::fitting_seq,
              "Where messages come in another order: the number of another one that fits; 0: none is known.")
      .def_prop_ro(
          "is_sent_fitting", [](const Misfit& self) { return self.is_sent_fitting != 0; },
          "Whether what was sent fits that receive; else what is received fits that message.");

  nb::class_<Splits>(module, "Splits", "Two ranks of which one sends what the other does not expect.")
      .def(
          "__init__",
          [](Splits* self, int sender, int receiver, std::int64_t bytes_sent, std::int64_t bytes_expected) {
            new (self) Splits{sender, receiver, bytes_sent, bytes_expected};
          },
          nb::kw_only(), "sender"_a, "receiver"_a, "bytes_sent"_a, "bytes_expected"_a)
      .def_static("find", &find_in, "sent"_a, "expected"_a,
                  "The first two ranks that do not fit, of the bytes that each rank sends to and expects from each.")
      .def_ro("sender", &Splits::sender)
      .def_ro("receiver", &Splits::receiver)
      .def_ro("bytes_sent", &Splits::bytes_sent)
      .def_ro("bytes_expected", &Splits::bytes_expected);

  nb::class_<Failure>(module, "Failure", "The first failure of a group.")
      .def(
          "__init__",
          [](Failure* self, int kind, int rank, const Description& call, std::uint64_t seq, std::string_view where,
             int peer, const std::optional<Misfit>& misfit, const std::optional<Splits>& splits,
             const std::vector<int>& missing, const std::vector<std::uint32_t>& other_tags, int leaving, int status,
             std::string_view reason, std::optional<std::uint64_t> agreed) {
            Failure failure{};
            failure.kind = static_cast<FailureKind>(kind);
            failure.rank = rank;
            failure.call = call;
            failure.seq = seq;
            failure.agreed = agreed.value_or(seq == 0 ? 0 : seq - 1);
            copy_text(failure.where, where);
            failure.peer = peer;
            if (misfit) failure.misfit = *misfit;
            if (splits) failure.splits = *splits;
            for (const int one : missing) {
              if (one < 0 || one >= kMaxRanks) throw std::invalid_argument("not a rank");
              failure.add_missing(one);
            }
            for (const std::uint32_t tag : other_tags) failure.add_other_tag(tag);
            failure.leaving = static_cast<Leaving>(leaving);
            failure.status = status;
            copy_text(failure.reason, reason);
            new (self) Failure(failure);
          },
          nb::kw_only(), "kind"_a, "rank"_a, "call"_a, "seq"_a, "where"_a = "", "peer"_a = kNoRank,
          "misfit"_a.none() = nb::none(), "splits"_a.none() = nb::none(), "missing"_a = std::vector<int>(),
          "other_tags"_a = std::vector<std::uint32_t>(), "leaving"_a = 0, "status"_a = kUnknownStatus, "reason"_a = "",
          "agreed"_a.none() = nb::none())
      .def_prop_ro("kind", [](const Failure& self) { return static_cast<int>(self.kind); })
      .def_ro("rank", &Failure::rank, "Who found it.")
      .def_ro("call", &Failure::call, "What the finder was doing.")
      .def_ro("seq", &Failure::seq)
      .def_ro("agreed", &Failure::agreed, "Of a mismatch: the last call up to which the two ranks are known to agree.")
      .def_prop_ro(
          "where", [](const Failure& self) { return text_of(self.where); }, "The finder's line.")
      .def_ro("peer", &Failure::peer, "The other side of a mismatch or message; the rank that left or died.")
      .def_prop_ro("misfit", [](const Failure& self) { return given(self.kind == FailureKind::message, self.misfit); })
      .def_prop_ro(
          "sizes_differ", [](const Failure& self) { return self.sizes_differ != 0; },
          "Whether it is about sizes that ranks exchange, and not known which ranks do not fit.")
      .def_prop_ro("splits", [](const Failure& self) { return given(self.splits.sender != kNoRank, self.splits); })
      .def_prop_ro("missing", &missing_of)
      .def_prop_ro(
          "asked", [](const Failure& self) { return self.asked != 0; },
          "Whether the missing ranks were asked just before where they are.")
      .def_prop_ro(
          "other_tags",
          [](const Failure& self) {
            return std::vector<std::uint32_t>(self.other_tags, self.other_tags + self.num_other_tags);
          },
          "Of messages that came instead of the one that is missing: the lowest.")
      .def_prop_ro(
          "leaving", [](const Failure& self) { return static_cast<int>(self.leaving); }, "How the peer left.")
      .def_ro("status", &Failure::status, "How the peer's process ended, as waitpid gives it.")
      .def_prop_ro(
          "command_line", [](const Failure& self) { return text_of(self.command_line); },
          "Of the program that has replaced the peer's.")
      .def_prop_ro("reason", [](const Failure& self) { return text_of(self.reason); }, "Of an abort.");
}

}  // namespace

void bind_description(nb::module_& module) {
  bind_call(module);
  bind_witness(module);
  bind_failure(module);
  bind_result(module);
}

}  // namespace phalanx
