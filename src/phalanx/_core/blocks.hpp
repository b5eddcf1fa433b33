// The caller's memory as a sequence of blocks, each a run of pieces (one a tensor), addressed by byte offset in a
// block.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace phalanx {

struct Piece {
  std::byte* data;
  std::uint64_t size;
};

class Blocks {
 public:
  void clear() noexcept;
  // The pieces of the next block, in order.
  void add_block(const Piece* pieces, std::size_t num_pieces);
  // Every piece is cut into `num` equal parts; block b is part b of each.
  void cut(const Piece* pieces, std::size_t num_pieces, std::size_t num);

  std::size_t num() const noexcept { return sizes_.size(); }
  bool empty() const noexcept { return sizes_.empty(); }
  std::uint64_t size(std::size_t block) const noexcept { return sizes_[block]; }
  std::uint64_t largest() const noexcept;
  std::uint64_t total() const noexcept {
    std::uint64_t total = 0;
    for (const std::uint64_t size : sizes_) total += size;
    return total;
  }

  // Calls fn(std::byte* data, std::uint64_t size, std::uint64_t done) for each contiguous run of [offset, offset+size),
  // `done` being the bytes of the runs before.
  template <class Fn>
  void for_runs(std::size_t block, std::uint64_t offset, std::uint64_t size, Fn&& fn) const {
    std::uint64_t done = 0;
    for (std::size_t i = first_[block]; i < first_[block + 1] && done < size; ++i) {
      const Piece& piece = pieces_[i];
      if (offset >= piece.size) {
        offset -= piece.size;
        continue;
      }
      const std::uint64_t run = std::min(piece.size - offset, size - done);
      fn(piece.data + offset, run, done);
      done += run;
      offset = 0;
    }
  }

  void read(std::size_t block, std::uint64_t offset, std::uint64_t size, std::byte* to) const;
  void write(std::size_t block, std::uint64_t offset, std::uint64_t size, const std::byte* from) const;
  // The address of [offset, offset+size) if it lies in one piece, else nullptr.
  std::byte* direct(std::size_t block, std::uint64_t offset, std::uint64_t size) const noexcept;

 private:
  std::vector<Piece> pieces_;
  std::vector<std::size_t> first_{0};  // first piece of each block, and one past the last
  std::vector<std::uint64_t> sizes_;
};

}  // namespace phalanx
