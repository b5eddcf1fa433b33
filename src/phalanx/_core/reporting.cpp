#include "reporting.hpp"

#include <algorithm>
#include <utility>

namespace phalanx {

void Reporting::begin(Finding finding, Clock::time_point now) {
  complete_by_ = now + kMismatchGrace;
  // Where the time of a call is up, nobody waits any longer.
  claim_.begin(lines_, now, finding.failure.kind == FailureKind::timeout);
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

void Reporting::end_now(Clock::time_point now) {
  if (!is_under_way()) return;
  complete_by_ = now;
  advance(now);
  finding_.reset();
}

bool Reporting::nap(Clock::time_point until) const noexcept {
  return lines_.nap(std::min(until, next_look(Clock::now())));
}

// True: it is over.
bool Reporting::report(Clock::time_point now) {
  const Claim::Next next = claim_.look(lines_, now);
  if (next != Claim::Next::claim) return next == Claim::Next::over;
  if (!claim_.claim(lines_)) return false;
  if (finding_->testify) finding_->testify(claim_.number());
  if (lines_.publish_report(claim_.number(), finding_->failure)) return true;
  // Another rank has taken over meanwhile, and has not published yet.
  claim_.begin(lines_, now, false);
  return false;
}

}  // namespace phalanx
