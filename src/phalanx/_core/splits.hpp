// Sizes that the ranks of a call exchange pair by pair.
#pragma once

#include <cstdint>
#include <optional>

#include "layout.hpp"

namespace phalanx {

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
