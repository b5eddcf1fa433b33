// How a rank compares its calls with those of its peers when nothing moves.
//
// A rank that posts compares only once all ranks have posted the call (posting.hpp). So a difference could stay unseen
// where a rank is absent, where the rank behind stops at the very call that differs, or where the only rank that has
// seen the difference dies. Here a rank compares with each peer alone, as far as both have posted. The thread that
// tends the rank does it now and then, or a scheduler right after a post; other threads of the rank may post meanwhile.
//
// The last words of the rank behind are in its ring, however far the other one is ahead. The one ahead keeps its own
// words for longer: kKeptBits. Beyond that it compares at the last number of a higher level that both have.
//
// A word of this rank may be replaced while it is read, as those of peers may, and the same second look shows it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "posting.hpp"

namespace phalanx {

// `Memory` has what Posting needs to read, also for the rank itself, and
//   std::uint64_t kept_word(int level, std::uint64_t slot)          of this rank's own memory; acquire
template <int kDepthBits, int kLevels, int kKeptBits, int kMostRanks>
class Comparing {
 public:
  using Words = Rings<kDepthBits, kLevels>;
  using KeptWords = Rings<kKeptBits, kLevels, kDepthBits>;

  Comparing(int rank, int size) noexcept : rank_(rank), size_(size) {}

  const Difference& difference() const noexcept { return difference_; }
  const OtherShape& other_shape() const noexcept { return other_shape_; }
  bool is_over() const noexcept { return state_ == State::over; }
  // The last call up to which this rank and the peer are known to agree.
  std::uint64_t agreed_with(int peer) const noexcept { return agreed_[static_cast<std::size_t>(peer)]; }
  // For tests: as if all calls up to this one had been compared.
  void start_after(std::uint64_t seq) noexcept { agreed_.fill(seq); }

  // Begins to compare with all peers.
  void begin() noexcept { begin(0, size_); }
  // Compares with all peers. False: a difference was found.
  template <class Memory>
  bool compare(const Memory& memory) noexcept {
    begin();
    return go_on(memory);
  }
  // The same with one peer.
  template <class Memory>
  bool compare_with(const Memory& memory, int peer) noexcept {
    begin(peer, peer + 1);
    return go_on(memory);
  }

  // Makes the next access. True: all peers were looked at, or a difference was found.
  template <class Memory>
  bool step(const Memory& memory) noexcept {
    switch (state_) {
      case State::look:
        theirs_ = memory.posted(peer_);
        state_ = State::look_at_own;
        return theirs_ <= agreed(peer_) && next_peer();
      case State::look_at_own:
        mine_ = memory.posted(rank_);
        return choose();
      case State::read:
        word_ = memory.word(peer_, level_, Words::slot(level_, at_));
        state_ = State::confirm;
        return false;
      case State::confirm:
        theirs_ = memory.posted_again(peer_);
        state_ = State::read_own;
        return Words::keeps(level_, at_, theirs_) ? false : was_replaced();
      case State::read_own:
        own_ = memory.kept_word(level_, KeptWords::slot(level_, at_));
        state_ = State::confirm_own;
        return false;
      case State::confirm_own:
        mine_ = memory.posted_again(rank_);
        return KeptWords::keeps(level_, at_, mine_) ? compare_words<Memory>() : was_replaced();
      case State::over:
        break;
    }
    return true;
  }

 private:
  enum class State : std::uint8_t { look, look_at_own, read, confirm, read_own, confirm_own, over };
  // A peer that goes on faster than this rank reads is compared with at the next look.
  static constexpr int kMostTries = 4;

  std::uint64_t& agreed(int peer) noexcept { return agreed_[static_cast<std::size_t>(peer)]; }
  bool are_kept(int level, std::uint64_t seq) const noexcept {
    return Words::keeps(level, seq, theirs_) && KeptWords::keeps(level, seq, mine_);
  }

  void begin(int first, int end) noexcept {
    peer_ = first - 1;
    end_ = end;
    next_peer();
  }
  template <class Memory>
  bool go_on(const Memory& memory) noexcept {
    while (!step(memory)) {
    }
    return !difference_;
  }

  bool next_peer() noexcept {
    is_searching_ = false;
    num_tries_ = 0;
    do {
      ++peer_;
    } while (peer_ == rank_);
    if (peer_ < end_) {
      state_ = State::look;
      return false;
    }
    return over();
  }
  bool over() noexcept {
    state_ = State::over;
    // Nothing is left of the look: the search through all states takes equal ones for one.
    is_searching_ = false;
    num_tries_ = level_ = peer_ = 0;
    mine_ = theirs_ = at_ = word_ = own_ = first_differing_ = 0;
    return true;
  }

  // To the last call that both have posted and of which both have the word.
  bool choose() noexcept {
    const std::uint64_t both = std::min(mine_, theirs_);
    for (level_ = 0; level_ < kLevels; ++level_) {
      at_ = both / Words::stride(level_) * Words::stride(level_);
      if (at_ <= agreed(peer_)) break;
      if (are_kept(level_, at_)) {
        state_ = State::read;
        return false;
      }
    }
    return next_peer();
  }

  bool was_replaced() noexcept {
    if (is_searching_) return search_on();
    return ++num_tries_ < kMostTries ? choose() : next_peer();
  }

  template <class Memory>
  bool compare_words() noexcept {
    if (!Memory::agree(word_, own_)) {
      first_differing_ = at_;
      if (!is_searching_) {
        is_searching_ = true;
        level_ = kLevels;
      }
      return search_below();
    }
    agreed(peer_) = at_;
    if (is_searching_) return search_on();
    if (word_ != own_) other_shape_ = {peer_, at_};
    return next_peer();
  }

  // The calls differ at first_differing_. The first that does may be one before it: between that and the last that
  // agrees it is looked for level by level, where the words are still there.
  bool search_below() noexcept {
    while (--level_ >= 0) {
      const std::uint64_t stride = Words::stride(level_);
      // Of the words that the peer has: a ring full of them.
      const std::uint64_t reach = Words::kDepth * stride, oldest = theirs_ > reach ? theirs_ - reach : 0;
      at_ = std::max(agreed(peer_), oldest) / stride * stride;
      if (!search_next()) return false;
    }
    difference_ = {peer_, agreed(peer_), first_differing_};
    return over();
  }
  bool search_on() noexcept { return search_next() ? search_below() : false; }
  // To the next call of the level that could be the first that differs; true: there is none.
  bool search_next() noexcept {
    const std::uint64_t stride = Words::stride(level_);
    for (at_ += stride; at_ < first_differing_; at_ += stride) {
      if (at_ > agreed(peer_) && are_kept(level_, at_)) {
        state_ = State::read;
        return false;
      }
    }
    return true;
  }

  std::int32_t rank_;
  std::int32_t size_;
  std::int32_t end_ = 0;  // one past the last peer of this look
  State state_ = State::over;
  bool is_searching_ = false;
  std::int32_t num_tries_ = 0;
  std::int32_t level_ = 0;
  std::int32_t peer_ = 0;
  std::uint64_t mine_ = 0, theirs_ = 0;  // numbers, as read last
  std::uint64_t at_ = 0;                 // the call that is compared
  std::uint64_t word_ = 0, own_ = 0;     // its words
  std::uint64_t first_differing_ = 0;
  Difference difference_;
  OtherShape other_shape_;
  std::array<std::uint64_t, kMostRanks> agreed_{};  // by peer: the last call that was compared
};

}  // namespace phalanx
