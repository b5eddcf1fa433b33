// What a call must give on all ranks, as a hash: compared at Check::full.
#pragma once

#include <cstdint>

#include "blocks.hpp"
#include "ops.hpp"

namespace phalanx {

// 0 for ops whose results differ between ranks.
std::uint64_t hash_of_result(Op op, const Blocks& in, const Blocks& out) noexcept;

}  // namespace phalanx
