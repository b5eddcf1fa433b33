// What ranks post of their calls, in a segment: the memory of posting.hpp, and the calls in full.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "posting.hpp"
#include "segment.hpp"

namespace phalanx {

// The collectives of a group, as one rank sees them. Posting counts ranks; here each of them becomes a seat.
class CallPosts {
 public:
  CallPosts(const Segment& segment, int rank) noexcept : segment_(segment), mine_(line(rank)) {}

  std::uint64_t posted(int rank) const noexcept { return line(rank).posted.load(std::memory_order_seq_cst); }
  std::uint64_t posted_again(int rank) const noexcept { return line(rank).posted.load(std::memory_order_acquire); }
  void set_posted(std::uint64_t seq) noexcept { mine_.posted.store(seq, std::memory_order_seq_cst); }
  std::uint64_t word(int rank, int level, std::uint64_t slot) const noexcept {
    return line(rank).words[level][slot].load(std::memory_order_acquire);
  }
  void set_word(int level, std::uint64_t slot, std::uint64_t word) noexcept {
    mine_.words[level][slot].store(word, std::memory_order_release);
  }

 private:
  PostLine& line(int rank) const noexcept { return segment_.post_line(segment_.seat_of(rank)); }

  const Segment& segment_;
  PostLine& mine_;
};

// The messages from one seat to another. Posting counts the two sides: the sender is 0, the receiver is 1.
class MessagePosts {
 public:
  MessagePosts(const Segment& segment, Seat from, Seat to, bool is_sender) noexcept
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

 private:
  PairLine* lines_[2];
  const int mine_;
};

// Writes a call into the ring, where it replaces the one that was posted kPostDepth calls before.
void write_entry(PostEntry& entry, std::uint64_t number, const PostEntry::Content& content) noexcept;
// None: it is not there any more, or not yet.
std::optional<PostEntry::Content> read_entry(const PostEntry& entry, std::uint64_t number) noexcept;

}  // namespace phalanx
