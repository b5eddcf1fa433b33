// What ranks post of their calls, in a segment: the memory of posting.hpp, and the calls in full.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>

#include "comparing.hpp"
#include "posting.hpp"
#include "segment.hpp"

namespace phalanx {

// Words of this rank in its own memory: written by the thread that posts, read by the one that compares at rest.
template <class Words>
class Kept {
 public:
  using Word = std::atomic<std::uint64_t>;

  Kept() : words_(static_cast<Word*>(allocate())) {}
  void set(int level, std::uint64_t slot, std::uint64_t word) noexcept {
    words_[index(level, slot)].store(word, std::memory_order_release);
  }
  std::uint64_t get(int level, std::uint64_t slot) const noexcept {
    return words_[index(level, slot)].load(std::memory_order_acquire);
  }

 private:
  static constexpr std::size_t kBytes = Words::kWords * sizeof(Word);
  // Zeroed pages of the system: those that are never used cost nothing. calloc() would clear memory that was used
  // before.
  static constexpr bool kMaps = kBytes >= 16 * kPage;

  static void* allocate() {
    void* const words =
        kMaps ? ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
              : std::calloc(Words::kWords, sizeof(Word));
    if (words == nullptr || words == MAP_FAILED) throw std::bad_alloc();
    return words;
  }
  struct Free {
    void operator()(Word* words) const noexcept {
      if (kMaps) {
        ::munmap(words, kBytes);
      } else {
        std::free(words);
      }
    }
  };
  static std::size_t index(int level, std::uint64_t slot) noexcept {
    return static_cast<std::size_t>(level) * Words::kDepth + slot;
  }
  std::unique_ptr<Word[], Free> words_;
};

// The collectives of a group, as one rank sees them. Posting counts ranks; here each of them becomes a seat.
class CallPosts {
 public:
  using Poster = Posting<kPostDepthBits, kPostLevels, kKeptPostBits, kMaxRanks>;
  using Comparer = Comparing<kPostDepthBits, kPostLevels, kKeptPostBits, kMaxRanks>;

  CallPosts(const Segment& segment, int rank) : segment_(segment), mine_(line(rank)) {}

  std::uint64_t posted(int rank) const noexcept { return line(rank).posted.load(std::memory_order_seq_cst); }
  std::uint64_t posted_again(int rank) const noexcept { return line(rank).posted.load(std::memory_order_acquire); }
  void set_posted(std::uint64_t seq) noexcept { mine_.posted.store(seq, std::memory_order_seq_cst); }
  std::uint64_t word(int rank, int level, std::uint64_t slot) const noexcept {
    return line(rank).words[level][slot].load(std::memory_order_acquire);
  }
  void set_word(int level, std::uint64_t slot, std::uint64_t word) noexcept {
    mine_.words[level][slot].store(word, std::memory_order_release);
  }
  void keep_word(int level, std::uint64_t slot, std::uint64_t word) noexcept { kept_.set(level, slot, word); }
  std::uint64_t kept_word(int level, std::uint64_t slot) const noexcept { return kept_.get(level, slot); }
  static bool agree(std::uint64_t word, std::uint64_t other) noexcept { return words_agree(word, other); }

 private:
  PostLine& line(int rank) const noexcept { return segment_.post_line(segment_.seat_of(rank)); }

  const Segment& segment_;
  PostLine& mine_;
  Kept<Poster::KeptWords> kept_;
};

// The messages from one seat to another. Posting counts the two sides: the sender is 0, the receiver is 1.
class MessagePosts {
 public:
  using Poster = Posting<kPairDepthBits, kPairLevels, kKeptPairBits, 2>;
  using Comparer = Comparing<kPairDepthBits, kPairLevels, kKeptPairBits, 2>;

  MessagePosts(const Segment& segment, Seat from, Seat to, bool is_sender)
      : lines_{&segment.pair_line(from, to, true), &segment.pair_line(from, to, false)}, mine_(is_sender ? 0 : 1) {}

  std::uint64_t posted(int side) const noexcept { return lines_[side]->posted.load(std::memory_order_seq_cst); }
  std::uint64_t posted_again(int side) const noexcept { return lines_[side]->posted.load(std::memory_order_acquire); }
  void set_posted(std::uint64_t seq) noexcept { lines_[mine_]->posted.store(seq, std::memory_order_seq_cst); }
  std::uint64_t word(int side, int level, std::uint64_t slot) const noexcept {
    return lines_[side]->words[level][slot].load(std::memory_order_acquire);
  }
  void set_word(int level, std::uint64_t slot, std::uint64_t word) noexcept {
    lines_[mine_]->words[level][slot].store(word, std::memory_order_release);
  }
  void keep_word(int level, std::uint64_t slot, std::uint64_t word) noexcept { kept_.set(level, slot, word); }
  std::uint64_t kept_word(int level, std::uint64_t slot) const noexcept { return kept_.get(level, slot); }
  static bool agree(std::uint64_t word, std::uint64_t other) noexcept { return message_words_agree(word, other); }

 private:
  PairLine* lines_[2];
  const int mine_;
  Kept<Poster::KeptWords> kept_;
};

// Writes a call into the ring, where it replaces the one that was posted kPostDepth calls before.
void write_entry(PostEntry& entry, std::uint64_t number, const PostEntry::Content& content) noexcept;
// None: it is not there any more, or not yet.
std::optional<PostEntry::Content> read_entry(const PostEntry& entry, std::uint64_t number) noexcept;

}  // namespace phalanx
