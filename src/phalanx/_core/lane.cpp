#include "lane.hpp"

#include <algorithm>
#include <thread>
#include <utility>

#include "progress.hpp"

namespace phalanx {

namespace {

// A ticket may be ended by the thread that has the lane; so often those who wait for the lane look.
constexpr std::chrono::milliseconds kBetweenLooks{5};
constexpr std::chrono::seconds kLongestSweep{1};
// Enough for a short call whose peers are there; the caller of a long one has better things to do.
constexpr int kTriesAtOnce = 4;

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

Result Lane::wait(const Ticket& ticket, Clock::time_point until) {
  bool goes_on = true;
  while (goes_on && ticket.pending()) {
    if (!acquire(std::min(until, Clock::now() + kBetweenLooks))) {
      goes_on = Clock::now() < until;
      continue;
    }
    disarm();
    const std::uint64_t num_ended = num_ended_.load(std::memory_order_relaxed);
    auto next_check = Clock::now() + kLongestSleep;
    while (goes_on && ticket.pending()) {
      // Somebody else who waits for the lane may have what he waits for.
      if (num_ended_.load(std::memory_order_relaxed) != num_ended && wanted()) break;
      const News news = advance() ? News::some : wait_for_news(until);
      const auto now = Clock::now();
      // However much there is to do for others: this ticket's peers may be gone, or its time be up.
      if (news != News::some || now >= next_check) {
        check();
        next_check = now + kLongestSleep;
      }
      goes_on = news != News::interrupted && now < until;
    }
    release();
    if (goes_on && ticket.pending()) std::this_thread::yield();
  }
  return ticket.result();
}

void Lane::hurry() noexcept {
  if (!idle()) progress().wake(true);
}

void Lane::hand_over(const Ticket& ticket, bool at_once) {
  if (at_once && try_acquire()) {
    disarm();
    for (int tries = 0; tries < kTriesAtOnce && ticket.pending() && advance(); ++tries) continue;
    free_.unlock();
  } else {
    wake_holder();
  }
  if (!idle()) progress().wake(!at_once);
}

Lane::Tended Lane::tend(bool urgent, std::vector<Bell>& bells) {
  if (idle()) return Tended::done;
  const std::uint64_t num_ended = num_ended_.load(std::memory_order_relaxed);
  if (!urgent && num_ended != std::exchange(num_ended_seen_, num_ended)) return Tended::alone;
  if (wanted() || !try_acquire()) return Tended::done;
  disarm();
  bool more = advance();
  if (!more) {
    check();
    if (!idle()) {
      const std::optional<Bell> bell = arm();
      more = !bell;
      if (bell) bells.push_back(*bell);
    }
  }
  num_ended_seen_ = num_ended_.load(std::memory_order_relaxed);
  free_.unlock();
  return more ? Tended::more : Tended::done;
}

std::vector<int> Lane::missing_for(const Ticket& ticket) {
  std::vector<int> peers;
  if (!acquire(Clock::now() + kLongestSweep)) return peers;
  if (ticket.pending()) peers = missing(ticket);
  release();
  return peers;
}

void Lane::sweep() {
  wake_holder();
  if (!acquire(Clock::now() + kLongestSweep)) return;
  disarm();
  check();
  free_.unlock();
}

}  // namespace phalanx
