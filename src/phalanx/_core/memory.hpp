// Questions about memory of this process.
#pragma once

#include <cstddef>
#include <string>

#include "blocks.hpp"

namespace phalanx {

// Whether the first and the last byte can be written. True where the system does not tell.
bool writable(const Piece& piece) noexcept;

// Up to `num` bytes from `address`, as many as can be read. Does not crash where there are none.
std::string readable_bytes(const void* address, std::size_t num);

}  // namespace phalanx
