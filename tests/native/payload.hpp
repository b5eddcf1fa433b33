// What random calls move and what must come out: contents that any rank can compute, and memory to hold them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "blocks.hpp"
#include "harness.hpp"
#include "kernels.hpp"

namespace stress {

using Bytes = std::vector<std::byte>;

inline constexpr DType kReducedDTypes[] = {DType::boolean, DType::uint8,   DType::int8,      DType::uint16,
                                           DType::int32,   DType::int64,   DType::uint64,    DType::bfloat16,
                                           DType::float32, DType::float64, DType::complex64, DType::complex128};

// What block `block` of rank `rank`'s input holds in the call with this key. The numbers are small integers, chosen so
// that reducing them is exact in every dtype but for the integers' wrapping around.
struct Contents {
  std::uint64_t key;
  DType dtype;
  int reduce_op;  // -1: none
  int size;

  Bytes input(int rank, int block, std::uint64_t count) const;
  // The reduction of that block of all ranks.
  Bytes reduced(int block, std::uint64_t count) const;
  // Each rank's own, for premul_sum.
  double factor(int rank) const;

 private:
  std::uint64_t place(int rank, int block) const;
  std::int64_t number(std::uint64_t place, std::uint64_t i) const;
  std::int64_t fold(std::int64_t a, std::int64_t b) const;
};

// Blocks in memory of their own, each piece an allocation of its exact size so that the address sanitizer sees one
// byte too many: listed block by block, or, where all blocks are alike, each piece cut into equal parts.
class Memory {
 public:
  Memory() = default;  // no blocks: the op does not read, or write, on this rank
  Memory(const std::vector<std::uint64_t>& counts, std::size_t element_size, Random& random);

  // One block that is this block of the other memory, in place.
  static Memory part(const Memory& whole, std::size_t block);

  std::size_t num_blocks() const { return blocks_.size(); }
  void describe(Blocks& blocks) const;
  void write(std::size_t block, const Bytes& bytes) const;
  Bytes read(std::size_t block) const;

 private:
  std::byte* allocate(std::uint64_t size, std::size_t element_size, Random& random);

  std::vector<std::unique_ptr<std::byte[]>> owned_;
  std::vector<std::vector<Piece>> blocks_;
  std::vector<Piece> cut_;  // the pieces as they are before cutting; empty where they are listed
};

}  // namespace stress
