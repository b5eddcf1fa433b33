// Hands arranged calls to the core: the last step of the front, for calls from torch and for normalised ones.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "bind_calls.hpp"
#include "front_forms.hpp"

namespace phalanx {

// Why a call can't be handed over as it is.
enum class Obstacle : std::uint8_t {
  none,
  not_plain,     // a tensor does not lie in plain memory
  overlap,       // the call would write what it has yet to read
  not_writable,  // memory that is written can't be
  no_memory,     // a tensor only pretends to have memory
};

// The memory of a call, and what keeps it.
class Memory {
 public:
  // Looks at the tensors of the call, and holds their storages. With the GIL held.
  Obstacle take(const Arranged& arranged, int rank, int size);

  // What the core writes.
  const std::vector<Piece>& written() const noexcept { return written_; }
  // A Python object that keeps the storages.
  nanobind::object keep() const;
  // For another call.
  void clear() noexcept {
    storages_.clear();
    written_.clear();
  }
  // Describes the call and gives it its memory.
  void fill(Request& request, const Arranged& arranged, int size) const;

 private:
  std::vector<nanobind::object> storages_;
  std::vector<Piece> written_;
};

Description describe_message(const TensorView& tensor, bool sends, int peer, std::uint32_t tag);
// One side of a message, as the core takes it.
std::shared_ptr<MessageTicket> message_of(const TensorView& tensor, bool sends, int peer, std::uint32_t tag);

}  // namespace phalanx
