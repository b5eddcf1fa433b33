#include "group.hpp"

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <utility>

namespace phalanx {

namespace {

constexpr std::uint64_t kKiB = 1024;

int checked(int rank, int size) {
  if (rank < 0 || rank >= size) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " is not in a group of " + std::to_string(size));
  }
  return rank;
}

}  // namespace

Tuning tuning_for(int ranks, int cpus) {
  const bool crowded = ranks > cpus;
  Tuning tuning{};
  tuning.slot_bytes = std::max<std::uint64_t>(256 * kKiB, smallest_slot(ranks));
  // Longer chunks where every wait costs context switches.
  tuning.chunk_bytes = crowded ? tuning.slot_bytes : 128 * kKiB;
  tuning.one_shot_bytes = ranks <= 2 ? 64 * kKiB : 32 * kKiB;
  tuning.crowded = crowded;
  tuning.spin_us = crowded ? 300 : 50;
  return tuning;
}

Group::Group(std::shared_ptr<Segment> segment, int rank)
    : segment_(std::move(segment)),
      lines_(*segment_, checked(rank, segment_->size())),
      call_(*segment_, lines_, history_) {
  history_.verified.resize(static_cast<std::size_t>(segment_->size()), 0);
  if (segment_->control(rank).claimed.exchange(1, std::memory_order_relaxed) != 0) {
    throw std::runtime_error("rank " + std::to_string(rank) + " of this group is taken by another process");
  }
}

Group::~Group() { leave(); }

void Group::start(std::chrono::nanoseconds timeout) {
  const auto now = Clock::now();
  deadline_ = timeout < Clock::time_point::max() - now ? now + timeout : Clock::time_point::max();
  call_.start(request_);
}

Outcome Group::proceed(Clock::time_point until) {
  until = std::min(until, deadline_);
  while (true) {
    switch (call_.advance()) {
      case Progress::finished:
        return Outcome::finished;
      case Progress::failed:
        return Outcome::failed;
      case Progress::more:
        if (Clock::now() >= until) return Outcome::pending;
        continue;
      case Progress::blocked:
        break;
    }
    const Condition& condition = call_.blocked_on();
    switch (lines_.wait(condition, until)) {
      case WaitResult::reached:
        continue;
      case WaitResult::failed:
        return Outcome::failed;
      case WaitResult::left:
        report(FailureKind::left, lines_.first_left(condition), {}, "");
        return Outcome::failed;
      case WaitResult::interrupted:
        return Outcome::pending;
      case WaitResult::expired:
        break;
    }
    const auto now = Clock::now();
    if (now < until) continue;
    if (now < deadline_) return Outcome::pending;
    const std::vector<int> missing = lines_.missing(condition);
    if (missing.empty()) continue;
    report(FailureKind::timeout, -1, missing, "");
    return Outcome::failed;
  }
}

void Group::report(FailureKind kind, int peer, const std::vector<int>& missing, const std::string& text) {
  Failure failure{};
  failure.kind = kind;
  failure.rank = rank();
  failure.peer = peer;
  failure.seq = call_.seq();
  failure.num_missing = static_cast<std::uint32_t>(missing.size());
  std::copy_n(missing.begin(), std::min(missing.size(), std::size(failure.missing)), failure.missing);
  std::snprintf(failure.text, sizeof(failure.text), "%s", text.c_str());
  lines_.fail(failure);
}

void Group::abort(const std::string& text) { report(FailureKind::aborted, -1, {}, text); }

void Group::leave() {
  if (forked() || left_.exchange(true)) return;
  lines_.leave();
}

}  // namespace phalanx
