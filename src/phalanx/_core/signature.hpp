// Hashes of what must agree across ranks.
#pragma once

#include <cstdint>

#include "description.hpp"

namespace phalanx {

constexpr std::uint64_t mix(std::uint64_t state, std::uint64_t value) noexcept {
  state ^= value + 0x9e3779b97f4a7c15 + (state << 6) + (state >> 2);
  state ^= state >> 30;
  state *= 0xbf58476d1ce4e5b9;
  state ^= state >> 27;
  state *= 0x94d049bb133111eb;
  return state ^ (state >> 31);
}

// The running hash of a rank's calls, with one more call: equal on two ranks whose calls agreed so far and still do
// (agrees() in description.hpp).
constexpr std::uint64_t chain_on(std::uint64_t chain, const Description& call) noexcept {
  const auto field = [](auto value) { return static_cast<std::uint64_t>(static_cast<std::int64_t>(value)); };
  chain = mix(chain, field(call.op) | (field(call.reduce_op) & 0xff) << 8 | field(call.dtype) << 16 |
                         field(call.device) << 24 | (field(call.root) & 0xffffffff) << 32);
  chain = mix(chain, field(call.count));
  return mix(chain, field(call.layout) | field(call.unlisted_dtype) << 32);
}

// A message among those of its tag.
constexpr std::uint64_t hash_of_message(const Description& message, std::uint64_t number) noexcept {
  return mix(mix(0, message.tag), number);
}

// The same for messages from one rank to another: equal on both if what the one sends is what the other receives.
constexpr std::uint64_t chain_on_message(std::uint64_t chain, const Description& message) noexcept {
  chain = mix(chain, static_cast<std::uint64_t>(message.dtype) | std::uint64_t{message.tag} << 32);
  return mix(mix(chain, static_cast<std::uint64_t>(message.count)), message.unlisted_dtype);
}

}  // namespace phalanx
