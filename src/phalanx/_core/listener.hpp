// What a rank does although it is busy elsewhere: a thread of its own answers its peers, and tells what was noticed.
//
// A peer that waits asks through the segment where this rank is. The thread, a Python one so that it can look at the
// program's frames, sleeps here until somebody asks. One per process, for all groups.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "segment.hpp"

namespace phalanx {

class Listener {
 public:
  // This process has a seat in the segment of a group.
  void add(std::shared_ptr<Segment> segment, Seat seat);
  void remove(const Segment& segment, Seat seat);
  // Something was noticed.
  void wake() noexcept;
  // While it is closed nobody sleeps here.
  void set_closed(bool closed) noexcept;

  struct News {
    bool asked = false;  // somebody wants to know where this rank is
    bool noted = false;  // take_note() of some group has something
  };
  // Sleeps until the thread is needed. None: it is not, any more.
  std::optional<News> next();
  // To all who asked, in all groups.
  void answer(const std::string& text);

 private:
  struct Taken {
    std::shared_ptr<Segment> segment;
    Seat seat;
    Answer& answer() const noexcept { return segment->answer(seat); }
  };
  std::vector<Taken> seats();

  std::mutex mutex_;
  std::vector<Taken> seats_;
  std::atomic<std::uint32_t> bell_{0};
  std::atomic<bool> closed_{false};
  std::atomic<bool> noted_{false};
};

// That of this process.
Listener& listener();

// Asks the rank in this seat where it is, without waiting for its answer.
void ask(const Segment& segment, Seat seat) noexcept;
// The answer to the last question that anybody asked it. None where it did not come in time.
std::optional<std::string> answer_of(const Segment& segment, Seat seat, std::chrono::nanoseconds patience);

}  // namespace phalanx
