#include "lane.hpp"

#include <algorithm>
#include <thread>
#include <utility>

namespace phalanx {

namespace {

// A ticket may be ended by the thread that has the lane; so often those who wait for the lane look.
constexpr std::chrono::milliseconds kBetweenLooks{5};
constexpr std::chrono::seconds kLongestSweep{1};
constexpr std::chrono::milliseconds kLongestLook{20};
// Enough for a short call whose peers are there. The caller has better things to do than other calls.
constexpr int kTriesAtOnce = 4;
constexpr std::size_t kManyPending = 16;

}  // namespace

bool Lane::acquire(Clock::time_point until) {
  if (try_acquire()) return true;
  waiting_.fetch_add(1, std::memory_order_relaxed);
  const bool locked = free_.try_lock_until(until);
  waiting_.fetch_sub(1, std::memory_order_relaxed);
  return locked;
}

void Lane::release() {
  free_.unlock();
  if (!idle()) progress().wake(true);
}

void Lane::stop_watching() {
  disarm();
  watched_.store(false, std::memory_order_seq_cst);
}

Result Lane::wait(const Ticket& ticket, Clock::time_point until) {
  bool goes_on = true;
  while (goes_on && ticket.pending()) {
    if (!try_acquire() && !acquire(std::min(until, Clock::now() + kBetweenLooks))) {
      goes_on = Clock::now() < until;
      continue;
    }
    stop_watching();
    const std::uint64_t num_ended = num_ended_.load(std::memory_order_relaxed);
    auto now = Clock::now();
    auto next_check = now + kLongestSleep;
    while (goes_on && ticket.pending()) {
      // Somebody else who waits for the lane may have what he waits for.
      if (num_ended_.load(std::memory_order_relaxed) != num_ended && wanted()) break;
      if (looking_.load(std::memory_order_relaxed) > 0) break;
      const News news = advance(now) ? News::some : wait_for_step(until);
      now = Clock::now();
      // However much there is to do for others: this ticket's peers may be gone, or its time be up.
      if (news != News::some || now >= next_check) {
        fail_stuck_calls();
        next_check = now + kLongestSleep;
      }
      goes_on = news != News::interrupted && now < until;
    }
    release();
    let_look();
    if (goes_on && ticket.pending()) std::this_thread::yield();
  }
  return ticket.result();
}

Lane::News Lane::wait_for_step(Clock::time_point until) {
  if (!reporting_.is_under_way()) return wait_for_news(until);
  return reporting_.nap(until) ? News::none : News::interrupted;
}

void Lane::report(Finding finding, Clock::time_point now) {
  if (reporting_.is_under_way()) return;
  reporting_.begin(std::move(finding), now);
  go_on_reporting(now);
}

bool Lane::go_on_reporting(Clock::time_point now) {
  if (!reporting_.advance(now)) return false;
  end_reported();
  return true;
}

void Lane::hurry() noexcept {
  if (!idle() && !watched_.load(std::memory_order_seq_cst)) progress().wake(true);
}

void Lane::hand_over(const Ticket& ticket, bool at_once) {
  bool stays_watched = false;
  if (at_once && try_acquire()) {
    int tries = 0;
    // The ticket was made just now: its time saves a look at the clock.
    while (tries < kTriesAtOnce && ticket.pending() && advance_briefly(tries == 0 ? ticket.made : Clock::now())) {
      ++tries;
    }
    stays_watched = tries < kTriesAtOnce && watched_.load(std::memory_order_relaxed) && arm_again();
    if (!stays_watched) stop_watching();
    free_.unlock();
  } else {
    wake_holder();
  }
  // Looked at after the lane was let go: the progress thread may just have found it taken.
  if (!idle() && !(stays_watched && watched_.load(std::memory_order_seq_cst))) progress().wake(!at_once);
}

Lane::Tended Lane::tend(bool urgent, Sleep& sleep) {
  // First: whoever hands over a call, and finds the lane watched, leaves it to this thread.
  watched_.store(false, std::memory_order_seq_cst);
  if (idle()) return Tended::done;
  const std::uint64_t num_ended = num_ended_.load(std::memory_order_relaxed);
  if (!urgent && num_ended != std::exchange(num_ended_seen_, num_ended)) return Tended::alone;
  if (wanted() || !try_acquire()) return Tended::done;
  disarm();
  bool more = advance(Clock::now());
  // With many calls in the lane, on all ranks, to sleep for each of them would cost most of the time.
  if (!more && pending_.load(std::memory_order_relaxed) >= kManyPending && linger()) {
    more = advance(Clock::now());
  }
  if (!more) {
    fail_stuck_calls();
    if (!idle()) {
      const std::optional<Bell> bell = arm();
      more = !bell;
      if (bell) sleep.bells.push_back(*bell);
      sleep.until = std::min(sleep.until, reporting_.next_look(Clock::now()));
      watched_.store(bell.has_value(), std::memory_order_seq_cst);
    }
  }
  num_ended_seen_ = num_ended_.load(std::memory_order_relaxed);
  free_.unlock();
  return more ? Tended::more : Tended::done;
}

Lane::Rest Lane::drain(Clock::time_point until) {
  bool everybody = false;
  bool ended = false;
  for (bool goes_on = true; goes_on && !idle() && acquire(until); goes_on = Clock::now() < until) {
    stop_watching();
    const News news = advance(Clock::now()) ? News::some : wait_for_step(until);
    if (news != News::some) fail_stuck_calls();
    everybody = !idle() && everybody_came();
    const std::uint64_t num_ended = num_ended_.load(std::memory_order_relaxed);
    ended = std::exchange(num_drained_, num_ended) != num_ended || ended;
    release();
    if (news == News::interrupted) break;
  }
  if (idle()) return Rest::nothing;
  return everybody || ended ? Rest::moving : Rest::waiting;
}

void Lane::let_look() const noexcept {
  if (looking_.load(std::memory_order_relaxed) == 0) return;
  const auto until = Clock::now() + kLongestLook;
  while (looking_.load(std::memory_order_relaxed) > 0 && Clock::now() < until) std::this_thread::yield();
}

std::optional<std::vector<PendingCall>> Lane::look(Clock::time_point until) {
  if (idle()) return std::vector<PendingCall>();
  looking_.fetch_add(1, std::memory_order_relaxed);
  wake_holder();
  std::optional<std::vector<PendingCall>> pending;
  if (acquire(until)) {
    stop_watching();
    bool more = true;
    while (more && Clock::now() < until) more = advance(Clock::now());
    if (!more && !reporting_.is_under_way()) pending = list_pending();
    release();
  }
  looking_.fetch_sub(1, std::memory_order_relaxed);
  return pending;
}

void Lane::sweep() {
  wake_holder();
  if (!acquire(Clock::now() + kLongestSweep)) return;
  stop_watching();
  fail_stuck_calls();
  free_.unlock();
}

}  // namespace phalanx
