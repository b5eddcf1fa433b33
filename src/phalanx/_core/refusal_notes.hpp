// Calls that a rank has refused because its own arguments were wrong, told to the peers that wait for them.
//
// A rank leaves one note for its collectives and one for its messages. A note is open until the rank hands over the
// call after all; its text stays until the next one, because the call may turn out to be another one than peers expect.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "segment.hpp"

namespace phalanx {

// In place of a peer or tag that was wrong itself.
inline constexpr int kUnknownPeer = -2;
inline constexpr std::int64_t kUnknownTag = -1;

// A rank that has refused a call may take so long to make it after all before those who wait for it are told.
inline constexpr std::chrono::milliseconds kRefusalGrace{250};

// This rank's notes, and its view of those of its peers. Writing takes the GIL: one thread at a time.
class RefusalNotes {
 public:
  RefusalNotes(const Segment& segment, int rank) noexcept : segment_(segment), seat_(segment.seat_of(rank)) {}

  void refuse_call(std::string_view text) noexcept;
  void refuse_message(bool sends, int peer, std::int64_t tag, std::string_view text) noexcept;
  // Before a call is handed over: peers need not hear of the refusal any more.
  void call_made() noexcept {
    if (call_refused_) close_call();
  }
  void message_made(bool sends, int peer, std::int64_t tag) noexcept {
    if (message_refused_) close_message(sends, peer, tag);
  }

  // False: no rank of the group has refused a call so far.
  bool any() const noexcept { return segment_.header().refused.load(std::memory_order_acquire) != 0; }
  // The texts of a rank's open notes.
  std::vector<std::string> open_of(int rank) const;

 private:
  void write(LaneKind kind, std::string_view text) noexcept;
  void close_call() noexcept;
  void close_message(bool sends, int peer, std::int64_t tag) noexcept;

  const Segment& segment_;
  const Seat seat_;
  bool call_refused_ = false;
  // Of the last message that was refused.
  bool message_refused_ = false;
  bool message_made_ = false;
  bool sends_ = false;
  int peer_ = kUnknownPeer;
  std::int64_t tag_ = kUnknownTag;
};

}  // namespace phalanx
