// Where each rank of a group has its memory in the segment.
//
// A rank is a member's number in the group: programs, requests, reports and Python speak of ranks. A seat is a place in
// one segment: what lies there is indexed by seat. The two are of different types, so that the compiler refuses one for
// the other; a Seating says which rank has which seat.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

namespace phalanx {

enum class Seat : std::int32_t {};

constexpr std::size_t index_of(Seat seat) noexcept { return static_cast<std::size_t>(seat); }

// All seats of a segment, for a loop.
class Seats {
 public:
  class Iterator {
   public:
    constexpr explicit Iterator(std::int32_t seat) noexcept : seat_(seat) {}
    constexpr Seat operator*() const noexcept { return Seat{seat_}; }
    constexpr Iterator& operator++() noexcept {
      ++seat_;
      return *this;
    }
    constexpr bool operator==(const Iterator&) const noexcept = default;

   private:
    std::int32_t seat_;
  };

  constexpr explicit Seats(int num) noexcept : num_(num) {}
  constexpr Iterator begin() const noexcept { return Iterator(0); }
  constexpr Iterator end() const noexcept { return Iterator(num_); }

 private:
  std::int32_t num_;
};

// Which rank has which seat. Each rank has one, and each seat a rank.
class Seating {
 public:
  // Rank r in seat r.
  explicit Seating(int size) : ranks_(static_cast<std::size_t>(size)), seats_(ranks_.size()) {
    std::iota(ranks_.begin(), ranks_.end(), 0);
    for (const Seat seat : all()) seats_[index_of(seat)] = seat;
  }
  // The rank of each seat. None: some rank is not there once.
  static std::optional<Seating> of(const std::vector<std::int32_t>& ranks) {
    Seating seating(static_cast<int>(ranks.size()));
    std::vector<bool> is_seated(ranks.size());
    for (const Seat seat : seating.all()) {
      const auto rank = static_cast<std::size_t>(ranks[index_of(seat)]);
      if (rank >= ranks.size() || is_seated[rank]) return std::nullopt;
      is_seated[rank] = true;
      seating.seats_[rank] = seat;
    }
    seating.ranks_ = ranks;
    return seating;
  }

  int size() const noexcept { return static_cast<int>(ranks_.size()); }
  Seats all() const noexcept { return Seats(size()); }
  Seat seat_of(int rank) const noexcept { return seats_[static_cast<std::size_t>(rank)]; }
  int rank_at(Seat seat) const noexcept { return ranks_[index_of(seat)]; }
  // The rank of each seat.
  const std::vector<std::int32_t>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<std::int32_t> ranks_;  // by seat
  std::vector<Seat> seats_;          // by rank
};

}  // namespace phalanx
