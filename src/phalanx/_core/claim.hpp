// How one of the ranks that have found a failure comes to report it.
//
// One rank at a time reports. A rank that finds a failure while another one reports waits for that report. It takes
// over with what it has found itself where the other rank has died or is held up (stopped, throttled) for too long, or
// where a timeout says that nobody waits any longer. Every report has memory of its own: a rank that was held up goes
// on writing to it, harmlessly.
#pragma once

#include <chrono>
#include <cstdint>

#include "futex.hpp"
#include "layout.hpp"

namespace phalanx {

// `Board` has what the ranks share, and knows who is dead: Lines, or the model of tests/native/interleavings.cpp.
class Claim {
 public:
  // `is_urgent`: this rank does not wait for another one that reports.
  template <class Board>
  void begin(const Board& board, Clock::time_point now, bool is_urgent) {
    seen_ = board.report_state();
    takes_over_at_ = is_urgent ? now : now + kLongestReport;
  }

  enum class Next {
    wait,   // look again later
    claim,  // nobody reports, or not any more
    over,   // there is a report, or there will be none
  };
  template <class Board>
  Next look(const Board& board, Clock::time_point now) {
    const ReportState state = board.report_state();
    if (state.is_published()) return Next::over;
    // A rank that has taken over gets its own time.
    if (state.word() != seen_.word()) takes_over_at_ = now + kLongestReport;
    seen_ = state;
    if (state.is_claimed() && now < takes_over_at_ && !board.is_dead(state.claimer())) return Next::wait;
    number_ = state.is_claimed() ? state.report() + 1 : 0;
    if (number_ >= kReports) return now < takes_over_at_ + kLastReport ? Next::wait : Next::over;
    return Next::claim;
  }
  // True: this rank is to publish the report number(). False: the state has changed since the look.
  template <class Board>
  bool claim(Board& board) const {
    return board.claim_report(seen_, number_);
  }
  std::uint32_t number() const noexcept { return number_; }

 private:
  // A rank may take so long from the claim of a report to its publishing, before another one takes over: what it does
  // meanwhile takes microseconds.
  static constexpr std::chrono::milliseconds kLongestReport{100};
  // The last one that can take over gets more time: after it, the group has no failure to tell.
  static constexpr std::chrono::milliseconds kLastReport{5000};

  ReportState seen_{0};
  std::uint32_t number_ = 0;
  Clock::time_point takes_over_at_{};
};

}  // namespace phalanx
