#include "front_calls.hpp"

#include <algorithm>
#include <utility>

#include "memory.hpp"
#include "shapes.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

using Span = std::pair<const std::byte*, const std::byte*>;

// The pieces of each block.
std::vector<std::vector<Span>> spans_of(const Side& side, int size) {
  Blocks blocks;
  side.fill(blocks, size);
  std::vector<std::vector<Span>> spans(blocks.num());
  for (std::size_t block = 0; block < blocks.num(); ++block) {
    blocks.for_runs(block, 0, blocks.size(block), [&](const std::byte* data, std::uint64_t run, std::uint64_t) {
      spans[block].emplace_back(data, data + run);
    });
  }
  return spans;
}

bool meet(const Span& one, const Span& other) noexcept { return one.first < other.second && other.first < one.second; }

// From the first byte of a side to behind the last one.
Span extent_of(const Side& side) noexcept {
  Span extent{nullptr, nullptr};
  for (const TensorView& tensor : side.tensors) {
    if (tensor.numel == 0) continue;
    const std::byte* end = tensor.data + tensor.bytes();
    extent = extent.second == nullptr
                 ? Span(tensor.data, end)
                 : Span(std::min<const std::byte*>(extent.first, tensor.data), std::max(extent.second, end));
  }
  return extent;
}

// Whether a tensor of one side shares bytes with a tensor of the other side. The extents of two lists often interleave.
bool meet(const Side& one, const Side& other) noexcept {
  if (!meet(extent_of(one), extent_of(other))) return false;
  const auto span_of = [](const TensorView& tensor) { return Span(tensor.data, tensor.data + tensor.bytes()); };
  return std::any_of(one.tensors.begin(), one.tensors.end(), [&](const TensorView& tensor) {
    return std::any_of(other.tensors.begin(), other.tensors.end(),
                       [&](const TensorView& another) { return meet(span_of(tensor), span_of(another)); });
  });
}

// Whether writing outputs could destroy inputs that are still to be read. In place, where each byte is read before it
// is written, is none of that: the same memory on both sides, or a rank's own block of the longer side. Tensors of an
// op in place share no memory: the forms check that.
bool overlaps(const Arranged& arranged, int rank, int size) {
  if (arranged.in.cut == Cut::nothing || arranged.out.cut == Cut::nothing) return false;
  if (!meet(arranged.in, arranged.out)) return false;
  const auto in = spans_of(arranged.in, size), out = spans_of(arranged.out, size);
  const auto own_block = static_cast<std::size_t>(rank);
  for (std::size_t i = 0; i < in.size(); ++i) {
    for (std::size_t o = 0; o < out.size(); ++o) {
      const bool own = (in.size() == 1 || i == own_block) && (out.size() == 1 || o == own_block);
      if (own && in[i] == out[o] && (in.size() == 1 || out.size() == 1)) continue;
      const auto meets_output = [&](const Span& read) {
        return std::any_of(out[o].begin(), out[o].end(), [&](const Span& written) { return meet(read, written); });
      };
      if (std::any_of(in[i].begin(), in[i].end(), meets_output)) return true;
    }
  }
  return false;
}

}  // namespace

Obstacle Memory::take(const Arranged& arranged, int rank, int size) {
  const auto take_side = [&](const Side& side, bool writes) {
    for (const TensorView& tensor : side.tensors) {
      if (tensor.data == nullptr && tensor.numel > 0) return Obstacle::no_memory;
      if (!is_plain(tensor)) return Obstacle::not_plain;
      storages_.push_back(storage_of(tensor));
      if (!writes) continue;
      if (!is_torchs_own(storages_.back()) && !writable(tensor.piece())) return Obstacle::not_writable;
      written_.push_back(tensor.piece());
    }
    return Obstacle::none;
  };
  Obstacle found = take_side(arranged.in, arranged.writes_input);
  if (found == Obstacle::none) found = take_side(arranged.out, true);
  if (found == Obstacle::none && overlaps(arranged, rank, size)) found = Obstacle::overlap;
  return found;
}

nb::object Memory::keep() const {
  if (storages_.size() == 1) return storages_[0];
  nb::list kept;
  for (const nb::object& storage : storages_) kept.append(storage);
  return kept;
}

void Memory::fill(Request& request, const Arranged& arranged, int size) const {
  static_cast<Description&>(request) = arranged.call;
  arranged.in.fill(request.in, size);
  if (arranged.writes_input) {
    arranged.in.fill(request.out, size);
  } else {
    arranged.out.fill(request.out, size);
  }
}

Description describe_message(const TensorView& tensor, bool sends, int peer, std::uint32_t tag) {
  Description call;
  call.op = sends ? Op::send : Op::recv;
  call.peer = peer;
  call.tag = tag;
  call.dtype = tensor.dtype;
  call.unlisted_dtype = tensor.unlisted_dtype;
  call.device = tensor.device;
  call.count = tensor.numel;
  call.shape = shape_of(tensor.shape, static_cast<std::size_t>(tensor.ndim), false, tensor.numel);
  return call;
}

std::shared_ptr<MessageTicket> message_of(const TensorView& tensor, bool sends, int peer, std::uint32_t tag) {
  auto ticket = std::make_shared<MessageTicket>();
  ticket->call = describe_message(tensor, sends, peer, tag);
  ticket->data = tensor.piece();
  return ticket;
}

}  // namespace phalanx
