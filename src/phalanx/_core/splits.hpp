// Sizes that the ranks of a call exchange pair by pair.
#pragma once

#include <cstdint>
#include <optional>

#include "layout.hpp"
#include "signature.hpp"

namespace phalanx {

// A call in which ranks exchange sizes pair by pair, for ranks that only post it. The balances of all ranks add up to 0
// where each rank expects from each other one what that one sends.
struct DividedCall : Description {
  std::uint64_t balance = 0;
};

// One rank's: what it sends to each rank, less what it expects of each, as hashes.
template <class Sent, class Expected>
std::uint64_t balance_of(int rank, int size, Sent&& sent, Expected&& expected) {
  const auto hash = [](int from, int to, std::uint64_t count) {
    return mix(mix(static_cast<std::uint64_t>(from), static_cast<std::uint64_t>(to)), count);
  };
  std::uint64_t balance = 0;
  for (int peer = 0; peer < size; ++peer) {
    balance += hash(rank, peer, static_cast<std::uint64_t>(sent(peer)));
    balance -= hash(peer, rank, static_cast<std::uint64_t>(expected(peer)));
  }
  return balance;
}

// The first two ranks, in rank order, of which one sends what the other does not expect: the same on every rank that
// looks. `sent(from, to)` and `expected(from, to)` are in bytes.
template <class Sent, class Expected>
std::optional<Splits> find_splits(int size, Sent&& sent, Expected&& expected) {
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      const auto bytes_sent = static_cast<std::int64_t>(sent(from, to));
      const auto bytes_expected = static_cast<std::int64_t>(expected(from, to));
      if (bytes_sent != bytes_expected) return Splits{from, to, bytes_sent, bytes_expected};
    }
  }
  return std::nullopt;
}

}  // namespace phalanx
