// What the files of steps share: the algorithms by op and the arithmetic of chunks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "call.hpp"

namespace phalanx {

extern const Algorithm kBarrier, kBroadcast, kAllGather, kGather, kScatter, kAllToAll;  // moves.cpp
extern const Algorithm kAllReduce, kReduce, kReduceScatter;                             // reductions.cpp

// A run of bytes of a block.
struct Range {
  std::uint64_t offset, size;
};

// Chunks start at cache lines, which also keeps every element whole.
inline constexpr std::uint64_t kChunkUnit = 64;

// Divides blocks of `bytes` into ticks, when a slot holds `parts` such chunks side by side.
inline void plan_ticks(Call& call, std::uint64_t bytes, std::uint64_t parts) {
  const Tuning& tuning = call.tuning();
  const std::uint64_t whole = tuning.slot_bytes / parts / kChunkUnit * kChunkUnit;
  const std::uint64_t share = std::max(tuning.chunk_bytes / parts / kChunkUnit * kChunkUnit, kChunkUnit);
  call.chunk = std::min(share, whole);
  call.ticks = std::max<std::uint64_t>(1, (bytes + call.chunk - 1) / call.chunk);
}

// The bytes of a block of this size that belong to the tick; empty where the block is shorter than others.
inline Range range_of(const Call& call, std::uint64_t tick, std::uint64_t size) {
  const std::uint64_t offset = std::min(tick * call.chunk, size);
  return {offset, std::min(call.chunk, size - offset)};
}

// Where in `owner`'s slot the chunk for `destination` lies.
inline std::byte* part_of_slot(const Call& call, int owner, std::uint64_t tick, int destination) {
  return call.slot(owner, tick) + static_cast<std::uint64_t>(destination) * call.chunk;
}

}  // namespace phalanx
