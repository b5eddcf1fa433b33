// How ranks find out whether they make the same calls, without ever waiting for each other.
//
// Each rank numbers its calls from 1 and posts each of them: it writes a word for it, a running hash of all its calls
// so far, and then the number. Then it looks at the numbers of its peers. The one that sees that all have posted a call
// compares the words. At least one rank sees that: each writes its number before it reads those of the others, and
// these accesses are sequentially consistent, so the rank whose write comes last sees the numbers of all.
//
// Words lie in a ring, and a rank may be ahead of a peer by more than the ring holds. So there is a ring for every
// call, one for every kDepth-th call, one for every kDepth-th of those, and so on: however far a rank is behind, some
// call is in a ring that it will come to, if it goes on. The hash runs over all calls: one comparison covers all that
// came before.
//
// A word may be replaced while it is read. A rank replaces the word of a call only after it has published the number
// just before the one that takes its place. So the reader looks at the number once more after it has read the word: as
// long as that has not come so far, the word is the right one. docs/decisions/0013-agreement.md has the whole argument.
//
// A rank also keeps its words in memory of its own, in deeper rings, for the thread that compares when nothing moves
// (comparing.hpp).
//
// The algorithm is a state machine that makes one access to shared memory per step. tests/native/interleavings.cpp runs
// it through all orders of the steps of several ranks.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace phalanx {

// Two ranks have made different calls: this one, and `peer`.
struct Difference {
  std::int32_t peer = -1;    // -1: there is none
  std::uint64_t agreed = 0;  // the last call up to which the two are known to agree
  std::uint64_t seq = 0;     // the call up to which they differ: the first that differs is after `agreed`, at most this
  // Whether it is known which call is the first that differs: `seq`.
  constexpr bool is_exact() const noexcept { return seq == agreed + 1; }
  constexpr explicit operator bool() const noexcept { return peer >= 0; }
};

// Two ranks make the same call with tensors of different shapes.
struct OtherShape {
  std::int32_t peer = -1;  // -1: there is none
  std::uint64_t seq = 0;
  constexpr explicit operator bool() const noexcept { return peer >= 0; }
};

// The word of a call: a part of the running hash of all calls up to it, and the hash of a shape, in which ranks may
// differ.
constexpr std::uint64_t posted_word(std::uint64_t chain, std::uint16_t shape) noexcept {
  return (chain & ~std::uint64_t{0xffff}) | shape;
}
constexpr bool words_agree(std::uint64_t one, std::uint64_t other) noexcept { return (one ^ other) >> 16 == 0; }

// The word of a message: a hash of which messages were made so far, and one of what they carry. Engines that match
// messages by tag let the two sides make them in different orders: only where both have made the same messages can they
// be compared. Where order counts the first is always the same.
constexpr std::uint64_t message_word(std::uint32_t which, std::uint32_t what) noexcept {
  return std::uint64_t{what} << 32 | which;
}
constexpr bool message_words_agree(std::uint64_t one, std::uint64_t other) noexcept {
  const bool are_same_messages = static_cast<std::uint32_t>(one) == static_cast<std::uint32_t>(other);
  return !are_same_messages || one >> 32 == other >> 32;
}

// The rings of words: kLevels of them, of kDepth words each. A level has every 2^kStrideBits-th word of the one below.
template <int kDepthBits, int kLevels, int kStrideBits = kDepthBits>
struct Rings {
  static constexpr std::uint64_t kDepth = std::uint64_t{1} << kDepthBits;
  static constexpr std::size_t kWords = kDepth * kLevels;
  static_assert(kDepth >= 2 && kDepthBits >= kStrideBits && kDepthBits + kStrideBits * (kLevels - 1) < 64);

  // Calls from one word of a level to the next.
  static constexpr std::uint64_t stride(int level) noexcept { return std::uint64_t{1} << (kStrideBits * level); }
  static constexpr bool has(int level, std::uint64_t seq) noexcept { return seq % stride(level) == 0; }
  static constexpr std::uint64_t slot(int level, std::uint64_t seq) noexcept { return seq / stride(level) % kDepth; }
  // Whether the word of `seq` is there for certain while its rank has posted `posted` calls and not more than begun the
  // next one.
  static constexpr bool keeps(int level, std::uint64_t seq, std::uint64_t posted) noexcept {
    return posted + 1 < seq + kDepth * stride(level);
  }
};

// One rank's side of the calls that `size` ranks make. `Memory` has, each as one access:
//   std::uint64_t posted(int rank)                                  sequentially consistent
//   std::uint64_t posted_again(int rank)                            after the read of a word
//   void set_posted(std::uint64_t seq)                              of this rank; sequentially consistent
//   std::uint64_t word(int rank, int level, std::uint64_t slot)     acquire
//   void set_word(int level, std::uint64_t slot, std::uint64_t)     of this rank; release
//   void keep_word(int level, std::uint64_t slot, std::uint64_t)    in this rank's own memory; release
//   static bool agree(std::uint64_t word, std::uint64_t other)       no access
template <int kDepthBits, int kLevels, int kKeptBits, int kMostRanks>
class Posting {
 public:
  using Words = Rings<kDepthBits, kLevels>;
  using KeptWords = Rings<kKeptBits, kLevels, kDepthBits>;

  Posting(int rank, int size) noexcept : rank_(rank), size_(size) {}

  // The last call that this rank has begun to post.
  std::uint64_t seq() const noexcept { return seq_; }
  // What was found last; none where nothing was.
  const Difference& difference() const noexcept { return difference_; }
  const OtherShape& other_shape() const noexcept { return other_shape_; }

  // For tests: as if so many calls had been posted, and compared with all peers.
  void start_after(std::uint64_t seq) noexcept {
    seq_ = seq;
    seen_.fill(seq);
    agreed_.fill(seq);
  }
  // Whether all ranks have posted the last call of this rank, as far as it knows.
  bool have_all_posted() const noexcept {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && seen_[static_cast<std::size_t>(peer)] < seq_) return false;
    }
    return true;
  }
  // The next access publishes the number of the call.
  bool is_about_to_publish() const noexcept { return state_ == State::publish; }

  // Begins to post the next call.
  void begin(std::uint64_t word) noexcept {
    ++seq_;
    own_[seq_ % Words::kDepth] = word;
    level_ = 0;
    state_ = State::write;
  }
  // Posts it, in as many accesses as there are. False: a difference was found.
  template <class Memory>
  bool post(Memory& memory, std::uint64_t word) noexcept {
    begin(word);
    while (!step(memory)) {
    }
    return !difference_;
  }

  // Makes the next access. True: the call is posted, and compared where this rank is the last.
  template <class Memory>
  bool step(Memory& memory) noexcept {
    switch (state_) {
      case State::write:
        memory.keep_word(level_, KeptWords::slot(level_, seq_), own(seq_));
        memory.set_word(level_, Words::slot(level_, seq_), own(seq_));
        if (++level_ == kLevels || !Words::has(level_, seq_)) state_ = State::publish;
        return false;
      case State::publish:
        memory.set_posted(seq_);
        return go_on(State::look);
      case State::look:
        seen(peer_) = memory.posted(peer_);
        // That peer, or one after it, will compare. It is looked at first the next time.
        if (seen(peer_) < seq_) return over();
        return go_on(State::look);
      case State::read:
        word_ = memory.word(peer_, level_, Words::slot(level_, at_));
        state_ = State::confirm;
        return false;
      case State::confirm:
        seen(peer_) = memory.posted_again(peer_);
        return confirm<Memory>();
      case State::over:
        break;
    }
    return true;
  }

 private:
  enum class State : std::uint8_t { write, publish, look, read, confirm, over };

  std::uint64_t& seen(int peer) noexcept { return seen_[static_cast<std::size_t>(peer)]; }
  std::uint64_t& agreed(int peer) noexcept { return agreed_[static_cast<std::size_t>(peer)]; }
  std::uint64_t own(std::uint64_t seq) const noexcept { return own_[seq % Words::kDepth]; }
  bool over() noexcept {
    state_ = State::over;
    return true;
  }

  // To the next access that `state` needs; true: there is none, and none after it.
  bool go_on(State state) noexcept {
    state_ = state;
    if (state == State::look) {
      // What was seen once stays true.
      for (int looked = 0; looked < size_; ++looked, peer_ = (peer_ + 1) % size_) {
        if (peer_ != rank_ && seen(peer_) < seq_) return false;
      }
      peer_ = 0;
    }
    for (; peer_ < size_; ++peer_) {
      if (peer_ == rank_) continue;
      at_ = seq_;
      level_ = 0;
      if (choose_level()) return false;
    }
    peer_ = 0;
    return over();
  }

  // Whether some ring of the peer has the word of the call at_, as far as this rank knows; from level_ on.
  bool choose_level() noexcept {
    state_ = State::read;
    while (level_ < kLevels && Words::has(level_, at_)) {
      if (Words::keeps(level_, at_, seen(peer_))) return true;
      ++level_;
    }
    return false;
  }

  bool next_peer() noexcept {
    ++peer_;
    return go_on(State::read);
  }

  // A word was read, and the peer's number after it.
  template <class Memory>
  bool confirm() noexcept {
    const bool is_searching = at_ < seq_;
    if (!Words::keeps(level_, at_, seen(peer_))) {
      if (is_searching) return search_on();
      ++level_;
      return choose_level() ? false : next_peer();
    }
    if (Memory::agree(word_, own(at_))) {
      if (word_ != own(at_)) other_shape_ = {peer_, at_};
      agreed(peer_) = std::max(agreed(peer_), at_);
      return is_searching ? search_on() : next_peer();
    }
    if (!is_searching && level_ == 0 && begin_search()) return false;
    return found();
  }

  bool found() noexcept {
    difference_ = {peer_, agreed(peer_), at_};
    return over();
  }

  // The call at_ differs. The first that does may be one before it that nobody has compared; false: there is none.
  bool begin_search() noexcept {
    const std::uint64_t oldest = seq_ >= Words::kDepth ? seq_ - Words::kDepth + 1 : 1;
    at_ = std::max(agreed(peer_) + 1, oldest);
    state_ = State::read;
    return at_ < seq_;
  }

  bool search_on() noexcept {
    state_ = State::read;
    return ++at_ == seq_ ? found() : false;
  }

  std::int32_t rank_;
  std::int32_t size_;
  State state_ = State::over;
  std::int32_t level_ = 0;
  std::int32_t peer_ = 0;
  std::uint64_t seq_ = 0;
  std::uint64_t at_ = 0;    // the call that is compared
  std::uint64_t word_ = 0;  // of the peer
  Difference difference_;
  OtherShape other_shape_;
  std::array<std::uint64_t, Words::kDepth> own_{};  // this rank's words, as in memory
  std::array<std::uint64_t, kMostRanks> seen_{};    // by peer: the number that was read last
  std::array<std::uint64_t, kMostRanks> agreed_{};  // by peer: the last call that was compared
};

}  // namespace phalanx
