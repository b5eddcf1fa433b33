// Questions about the caller's memory.
#pragma once

#include "blocks.hpp"

namespace phalanx {

// Whether the first and the last byte can be written. True where the system does not tell.
bool writable(const Piece& piece) noexcept;

}  // namespace phalanx
