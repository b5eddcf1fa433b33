// How a failure that a rank has found becomes the failure of its group: a state machine that is advanced, never a
// function that waits.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "claim.hpp"
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
  // So often it is advanced while it can't be done at once.
  static constexpr std::chrono::milliseconds kBetweenLooks{1};

  explicit Reporting(Lines& lines) noexcept : lines_(lines) {}

  void begin(Finding finding, Clock::time_point now);
  bool is_under_way() const noexcept { return finding_.has_value(); }
  // Goes on. True: it is over, and the group has a failure, this one or another, unless all ranks that began to report
  // one are held up for seconds.
  bool advance(Clock::time_point now);
  // From now on the report waits for nobody who is absent.
  void hurry(Clock::time_point now) noexcept { complete_by_ = now; }
  // When to go on again: never, where nothing is reported.
  Clock::time_point next_look(Clock::time_point now) const noexcept {
    return is_under_way() ? now + kBetweenLooks : Clock::time_point::max();
  }
  // Sleeps until then, or until another rank has reported a failure. False: a signal came.
  bool nap(Clock::time_point until) const noexcept;
  // For a rank that leaves the group: reports what it has found if that can be done at once, and forgets it.
  void end_now(Clock::time_point now);
  // Another rank has reported a failure.
  void forget() noexcept { finding_.reset(); }

 private:
  bool report(Clock::time_point now);

  Lines& lines_;
  std::optional<Finding> finding_;
  Clock::time_point complete_by_{};
  Claim claim_;
};

}  // namespace phalanx
