#include "blocks.hpp"

#include <cstring>

namespace phalanx {

void Blocks::clear() noexcept {
  pieces_.clear();
  first_.resize(1);
  sizes_.clear();
}

void Blocks::add_block(const Piece* pieces, std::size_t num_pieces) {
  std::uint64_t size = 0;
  for (std::size_t i = 0; i < num_pieces; ++i) {
    pieces_.push_back(pieces[i]);
    size += pieces[i].size;
  }
  first_.push_back(pieces_.size());
  sizes_.push_back(size);
}

void Blocks::cut(const Piece* pieces, std::size_t num_pieces, std::size_t num) {
  for (std::size_t block = 0; block < num; ++block) {
    std::uint64_t size = 0;
    for (std::size_t i = 0; i < num_pieces; ++i) {
      const std::uint64_t part = pieces[i].size / num;
      pieces_.push_back({pieces[i].data + block * part, part});
      size += part;
    }
    first_.push_back(pieces_.size());
    sizes_.push_back(size);
  }
}

std::uint64_t Blocks::largest() const noexcept {
  std::uint64_t largest = 0;
  for (const std::uint64_t size : sizes_) largest = std::max(largest, size);
  return largest;
}

void Blocks::read(std::size_t block, std::uint64_t offset, std::uint64_t size, std::byte* to) const {
  for_runs(block, offset, size, [&](const std::byte* data, std::uint64_t run, std::uint64_t done) {
    if (to + done != data) std::memcpy(to + done, data, run);
  });
}

void Blocks::write(std::size_t block, std::uint64_t offset, std::uint64_t size, const std::byte* from) const {
  for_runs(block, offset, size, [&](std::byte* data, std::uint64_t run, std::uint64_t done) {
    if (data != from + done) std::memcpy(data, from + done, run);
  });
}

std::byte* Blocks::direct(std::size_t block, std::uint64_t offset, std::uint64_t size) const noexcept {
  for (std::size_t i = first_[block]; i < first_[block + 1]; ++i) {
    const Piece& piece = pieces_[i];
    if (offset < piece.size) return size <= piece.size - offset ? piece.data + offset : nullptr;
    offset -= piece.size;
  }
  return nullptr;
}

}  // namespace phalanx
