#include "results.hpp"

#include <algorithm>
#include <cstring>

#include "signature.hpp"

namespace phalanx {

namespace {

// Of the bytes one after another, however they are divided into blocks and pieces: ranks may do that differently.
std::uint64_t hash_of(const Blocks& blocks) noexcept {
  std::uint64_t hash = 1;
  std::byte word[sizeof(std::uint64_t)];
  std::size_t filled = 0;
  const auto take = [&] {
    std::uint64_t value = 0;
    std::memcpy(&value, word, filled);
    hash = mix(hash, value);
    filled = 0;
  };
  for (std::size_t block = 0; block < blocks.num(); ++block) {
    blocks.for_runs(block, 0, blocks.size(block), [&](const std::byte* data, std::uint64_t run, std::uint64_t) {
      while (run > 0) {
        const std::uint64_t part = std::min<std::uint64_t>(run, sizeof(word) - filled);
        std::memcpy(word + filled, data, part);
        filled += part;
        if (filled == sizeof(word)) take();
        data += part;
        run -= part;
      }
    });
  }
  if (filled > 0) take();
  return hash;
}

}  // namespace

std::uint64_t hash_of_result(Op op, const Blocks& in, const Blocks& out) noexcept {
  if (!traits_of(op).shared_result) return 0;
  // The root of a broadcast writes nothing.
  return hash_of(out.empty() ? in : out);
}

}  // namespace phalanx
