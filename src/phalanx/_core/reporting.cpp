#include "reporting.hpp"

#include <algorithm>
#include <utility>

namespace phalanx {

void Reporting::begin(Finding finding, Clock::time_point now) {
  complete_by_ = now + kMismatchGrace;
  seen_ = lines_.report_state();
  // Where the time of a call is up, nobody waits any longer.
  takes_over_at_ = finding.failure.kind == FailureKind::timeout ? now : now + kLongestReport;
  finding_ = std::move(finding);
}

bool Reporting::advance(Clock::time_point now) {
  if (!lines_.failed()) {
    if (finding_->is_complete && now < complete_by_ && !finding_->is_complete()) return false;
    if (!report(now)) return false;
  }
  finding_.reset();
  lines_.ring_all();
  return true;
}

bool Reporting::nap(Clock::time_point until) const noexcept {
  return lines_.nap(std::min(until, next_look(Clock::now())));
}

bool Reporting::may_claim(ReportState state, Clock::time_point now) const {
  return !state.is_claimed() || now >= takes_over_at_ || lines_.is_dead(state.claimer());
}

bool Reporting::report(Clock::time_point now) {
  const ReportState state = lines_.report_state();
  if (state.is_published()) return true;
  // A rank that has taken over gets its own time.
  if (state.word() != seen_.word()) takes_over_at_ = now + kLongestReport;
  seen_ = state;
  if (!may_claim(state, now)) return false;
  const std::uint32_t number = state.is_claimed() ? state.report() + 1 : 0;
  if (number >= kReports) return now >= takes_over_at_ + kLastReport;
  if (!lines_.claim_report(state, number)) return false;
  if (finding_->testify) finding_->testify(number);
  if (lines_.publish_report(number, finding_->failure)) return true;
  // Another rank has taken over meanwhile, and has not published yet.
  seen_ = lines_.report_state();
  takes_over_at_ = now + kLongestReport;
  return false;
}

}  // namespace phalanx
