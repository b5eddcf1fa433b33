#include "payload.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

namespace stress {

namespace {

constexpr std::byte kUnwritten{0xee};

bool is_complex(DType dtype) { return dtype == DType::complex64 || dtype == DType::complex128; }

bool is_integer(DType dtype) { return dtype >= DType::uint8 && dtype <= DType::int64; }

bool has_sign(DType dtype) {
  return !is_integer(dtype) || dtype == DType::int8 || dtype == DType::int32 || dtype == DType::int64;
}

template <class T>
void store(T value, std::byte* to) {
  std::memcpy(to, &value, sizeof(value));
}

// One number: an element, or a part of a complex one.
void encode(DType dtype, std::int64_t number, std::byte* to) {
  switch (dtype) {
    case DType::uint16:
      return store(static_cast<std::uint16_t>(number), to);
    case DType::int32:
      return store(static_cast<std::int32_t>(number), to);
    case DType::int64:
    case DType::uint64:
      return store(number, to);
    case DType::bfloat16:
      return store(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(number)) >> 16), to);
    case DType::float32:
    case DType::complex64:
      return store(static_cast<float>(number), to);
    case DType::float64:
    case DType::complex128:
      return store(static_cast<double>(number), to);
    default:
      return store(static_cast<std::uint8_t>(number), to);
  }
}

}  // namespace

std::uint64_t Contents::place(int rank, int block) const {
  return mix(key, static_cast<std::uint64_t>(rank) << 32 | static_cast<std::uint64_t>(block));
}

std::int64_t Contents::number(std::uint64_t place, std::uint64_t i) const {
  const std::uint64_t hash = (place ^ i) * 0x9e3779b97f4a7c15;
  if (reduce_op < 0) return static_cast<std::int64_t>(dtype == DType::none ? hash >> 56 : hash >> 57);
  const auto eight = static_cast<std::int64_t>(hash >> 61);
  if (dtype == DType::boolean) return eight > 1;
  switch (static_cast<ReduceOp>(reduce_op)) {
    case ReduceOp::product:  // no zeros, which may come out negative
      return (eight % 2 + 1) * (has_sign(dtype) && eight >= 4 ? -1 : 1);
    case ReduceOp::avg:
      return is_integer(dtype) ? eight - (has_sign(dtype) ? 3 : 0) : (eight - 3) * size;
    default:
      return eight - (has_sign(dtype) ? 3 : 0);
  }
}

double Contents::factor(int rank) const {
  if (reduce_op != static_cast<int>(ReduceOp::premul_sum)) return 1.0;
  return static_cast<double>(mix(key, static_cast<std::uint64_t>(rank)) % 3 + 1);
}

Bytes Contents::input(int rank, int block, std::uint64_t count) const {
  Bytes bytes(count * element_size(dtype));
  const std::uint64_t numbers = is_complex(dtype) ? 2 * count : count;
  const std::size_t width = numbers == 0 ? 0 : bytes.size() / numbers;
  const std::uint64_t here = place(rank, block);
  for (std::uint64_t i = 0; i < numbers; ++i) encode(dtype, number(here, i), bytes.data() + i * width);
  return bytes;
}

std::int64_t Contents::fold(std::int64_t a, std::int64_t b) const {
  switch (static_cast<ReduceOp>(reduce_op)) {
    case ReduceOp::sum:
      return dtype == DType::boolean ? (a | b) : a + b;
    case ReduceOp::product:
      return a * b;
    case ReduceOp::min:
      return std::min(a, b);
    case ReduceOp::max:
      return std::max(a, b);
    case ReduceOp::band:
      return a & b;
    case ReduceOp::bor:
      return a | b;
    case ReduceOp::bxor:
      return a ^ b;
    default:
      return a + b;
  }
}

Bytes Contents::reduced(int block, std::uint64_t count) const {
  Bytes bytes(count * element_size(dtype));
  const std::uint64_t parts = is_complex(dtype) ? 2 : 1;
  const std::size_t width = element_size(dtype) / parts;
  const bool multiplies_complex = parts == 2 && reduce_op == static_cast<int>(ReduceOp::product);
  std::vector<std::uint64_t> places;
  std::vector<std::int64_t> factors;
  for (int rank = 0; rank < size; ++rank) {
    places.push_back(place(rank, block));
    factors.push_back(static_cast<std::int64_t>(factor(rank)));
  }
  const auto scaled = [&](int rank, std::uint64_t i) {
    const auto r = static_cast<std::size_t>(rank);
    return number(places[r], i) * factors[r];
  };
  for (std::uint64_t i = 0; i < count * parts; ++i) {
    std::int64_t result = scaled(0, i);
    if (multiplies_complex) {
      if (i % 2 == 1) continue;
      std::int64_t re = result, im = scaled(0, i + 1);
      for (int rank = 1; rank < size; ++rank) {
        const std::int64_t a = scaled(rank, i), b = scaled(rank, i + 1), before = re;
        re = before * a - im * b;
        im = before * b + im * a;
      }
      encode(dtype, im, bytes.data() + (i + 1) * width);
      result = re;
    } else {
      for (int rank = 1; rank < size; ++rank) result = fold(result, scaled(rank, i));
      if (reduce_op == static_cast<int>(ReduceOp::avg)) result /= size;
    }
    encode(dtype, result, bytes.data() + i * width);
  }
  return bytes;
}

std::byte* Memory::allocate(std::uint64_t size, std::size_t element_size, Random& random) {
  if (size == 0) return nullptr;
  // Tensors are aligned to an element, not more.
  const std::size_t offset = random.one_in(2) ? element_size : 0;
  owned_.push_back(std::make_unique<std::byte[]>(offset + size));
  std::byte* data = owned_.back().get() + offset;
  std::fill_n(data, size, kUnwritten);
  return data;
}

Memory::Memory(const std::vector<std::uint64_t>& counts, std::size_t element_size, Random& random) {
  blocks_.resize(counts.size());
  // Often so many pieces that no run of bytes of interest lies in one of them.
  const std::uint64_t num_pieces = 1 + random.below(random.pick({1u, 1u, 4u, 64u}));
  const auto divide = [&](std::uint64_t count) {
    std::vector<std::uint64_t> ends{count};
    for (std::uint64_t i = 1; i < num_pieces; ++i) ends.push_back(random.below(count + 1));
    std::sort(ends.begin(), ends.end());
    std::adjacent_difference(ends.begin(), ends.end(), ends.begin());
    return ends;
  };
  if (counts.empty()) return;
  const bool even = std::all_of(counts.begin(), counts.end(), [&](std::uint64_t count) { return count == counts[0]; });
  if (even && random.one_in(2)) {
    for (const std::uint64_t count : divide(counts[0])) {
      const std::uint64_t size = count * element_size;
      cut_.push_back({allocate(size * counts.size(), element_size, random), size * counts.size()});
      for (std::size_t b = 0; b < counts.size(); ++b) blocks_[b].push_back({cut_.back().data + b * size, size});
    }
    return;
  }
  for (std::size_t b = 0; b < counts.size(); ++b) {
    for (const std::uint64_t count : divide(counts[b])) {
      const std::uint64_t size = count * element_size;
      blocks_[b].push_back({allocate(size, element_size, random), size});
    }
  }
}

Memory Memory::part(const Memory& whole, std::size_t block) {
  Memory memory;
  memory.blocks_.push_back(whole.blocks_[block]);
  return memory;
}

void Memory::describe(Blocks& blocks) const {
  blocks.clear();
  if (!cut_.empty()) return blocks.cut(cut_.data(), cut_.size(), blocks_.size());
  for (const std::vector<Piece>& pieces : blocks_) blocks.add_block(pieces.data(), pieces.size());
}

void Memory::write(std::size_t block, const Bytes& bytes) const {
  const std::byte* from = bytes.data();
  for (const Piece& piece : blocks_[block]) {
    std::copy_n(from, piece.size, piece.data);
    from += piece.size;
  }
}

Bytes Memory::read(std::size_t block) const {
  Bytes bytes;
  for (const Piece& piece : blocks_[block]) bytes.insert(bytes.end(), piece.data, piece.data + piece.size);
  return bytes;
}

}  // namespace stress
