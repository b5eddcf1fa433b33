#include "refusal_notes.hpp"

#include <utility>

namespace phalanx {

void RefusalNotes::write(LaneKind kind, std::string_view text) noexcept {
  RefusalLine& line = segment_.refusal(seat_, kind);
  line.text.write(text);
  // After the text: who finds the note open reads this text or a later one.
  line.open.store(1, std::memory_order_release);
  segment_.header().refused.store(1, std::memory_order_release);
}

void RefusalNotes::refuse_call(std::string_view text) noexcept {
  write(LaneKind::calls, text);
  call_refused_ = true;
}

void RefusalNotes::refuse_message(bool sends, int peer, std::int64_t tag, std::string_view text) noexcept {
  write(LaneKind::messages, text);
  message_refused_ = true;
  message_made_ = false;
  sends_ = sends;
  peer_ = peer;
  tag_ = tag;
}

// The text has the call's seq: no later call is mistaken for it.
void RefusalNotes::close_call() noexcept {
  call_refused_ = false;
  segment_.refusal(seat_, LaneKind::calls).open.store(0, std::memory_order_release);
}

// Messages have no number that both sides know: the text goes with the second message of the kind.
void RefusalNotes::close_message(bool sends, int peer, std::int64_t tag) noexcept {
  if (sends != sends_ || peer != peer_ || (tag_ != kUnknownTag && tag != tag_)) return;
  RefusalLine& line = segment_.refusal(seat_, LaneKind::messages);
  line.open.store(0, std::memory_order_release);
  if (message_made_) {
    line.text.write("");
    message_refused_ = false;
  }
  message_made_ = true;
}

std::vector<std::string> RefusalNotes::open_of(int rank) const {
  std::vector<std::string> texts;
  for (const LaneKind kind : {LaneKind::calls, LaneKind::messages}) {
    const RefusalLine& line = segment_.refusal(segment_.seat_of(rank), kind);
    if (line.open.load(std::memory_order_acquire) == 0) continue;
    std::string text = line.text.read();
    if (!text.empty()) texts.push_back(std::move(text));
  }
  return texts;
}

}  // namespace phalanx
