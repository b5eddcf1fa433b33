// How a failure that a rank has found becomes the failure of its group: a state machine that is advanced, never a
// function that waits.
//
// One rank at a time reports. A rank that finds a failure while another one reports waits for that report. It takes
// over with what it has found itself where the other rank has died or is held up (stopped, throttled) for too long, or
// where a timeout says that nobody waits any longer. Every report has memory of its own: a rank that was held up goes
// on writing to it, harmlessly.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "waiting.hpp"

namespace phalanx {

// A report waits so long for ranks that are about to make the call.
inline constexpr std::chrono::milliseconds kMismatchGrace{50};

struct Finding {
  Failure failure;
  // Writes the testimonies of the report with this number, each time this rank claims one.
  std::function<void(std::uint32_t report)> testify = nullptr;
  // Whether all have come of whom the testimonies can tell. The report waits for them for a moment.
  std::function<bool()> is_complete = nullptr;
};

class Reporting {
 public:
  explicit Reporting(Lines& lines) noexcept : lines_(lines) {}

  void begin(Finding finding, Clock::time_point now);
  bool is_under_way() const noexcept { return finding_.has_value(); }
  // Goes on. True: it is over, and the group has a failure, this one or another, unless all ranks that began to report
  // one are held up for seconds.
  bool advance(Clock::time_point now);
  // When to go on again: never, where nothing is reported.
  Clock::time_point next_look(Clock::time_point now) const noexcept {
    return is_under_way() ? now + kBetweenLooks : Clock::time_point::max();
  }
  // Sleeps until then, or until another rank has reported a failure. False: a signal came.
  bool nap(Clock::time_point until) const noexcept;
  // This rank leaves the group.
  void drop() noexcept { finding_.reset(); }

 private:
  static constexpr std::chrono::milliseconds kBetweenLooks{1};
  // A rank may take so long from the claim of a report to its publishing, before another one takes over: what it does
  // meanwhile takes microseconds.
  static constexpr std::chrono::milliseconds kLongestReport{100};
  // The last one that can take over gets more time: after it, the group has no failure to tell.
  static constexpr std::chrono::milliseconds kLastReport{5000};

  bool report(Clock::time_point now);
  bool may_claim(ReportState state, Clock::time_point now) const;

  Lines& lines_;
  std::optional<Finding> finding_;
  Clock::time_point complete_by_{};
  // Another rank's claim, and when this rank takes over from it.
  ReportState seen_{0};
  Clock::time_point takes_over_at_{};
};

}  // namespace phalanx
