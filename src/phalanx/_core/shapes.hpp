// Sizes as a description keeps them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "description.hpp"

namespace phalanx {

// Takes one more value into a hash.
constexpr std::uint64_t hash_on(std::uint64_t hash, std::uint64_t value) noexcept {
  hash = (hash ^ value) * 0xff51afd7ed558ccd;
  return hash ^ hash >> 32;
}

// Of a tensor, or of the tensors of a list. Ranks compare only the shapes of tensors whose count they compare.
inline Shape shape_of(const std::int64_t* sizes, std::size_t num, bool listed, std::int64_t count) noexcept {
  Shape shape;
  shape.num = static_cast<std::uint8_t>(std::min<std::size_t>(num, 255));
  shape.listed = listed;
  std::uint64_t hash = 0x9e3779b97f4a7c15 + num;
  for (std::size_t i = 0; i < num; ++i) {
    if (i < kSizesKept) {
      shape.sizes[i] = static_cast<std::uint32_t>(std::clamp<std::int64_t>(sizes[i], 0, UINT32_MAX));
    } else if (listed) {
      break;
    }
    hash = hash_on(hash, static_cast<std::uint64_t>(sizes[i]));
  }
  if (!listed && count >= 0) shape.hash = static_cast<std::uint16_t>(hash >> 16) | 1;
  return shape;
}

}  // namespace phalanx
