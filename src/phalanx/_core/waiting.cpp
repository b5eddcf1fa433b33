#include "waiting.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <thread>
#include <utility>

namespace phalanx {

namespace {

// No sleep is longer, so that whoever waits can look around now and then.
constexpr std::chrono::milliseconds kLongestSleep{50};
constexpr int kSpinsBetweenLooks = 64;
// A CPU that comes back so late was taken by a program that computes, not by a peer.
constexpr std::chrono::microseconds kLongLoan{500};
constexpr int kFewestWaitsAfterLongLoan = 4;
constexpr int kMostWaitsAfterLongLoan = 256;

void pause_cpu() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// The futex is shared (not private): the waiters are other processes.
// False when a signal ended it.
bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::nanoseconds timeout) noexcept {
  timespec spec{static_cast<time_t>(timeout.count() / 1'000'000'000),
                static_cast<long>(timeout.count() % 1'000'000'000)};
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, expected, &spec, nullptr, 0) == 0 ||
         errno != EINTR;
}

void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept {
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// The CPU this thread runs on, plus 1; 0 where the system does not tell.
std::uint32_t current_cpu() noexcept { return static_cast<std::uint32_t>(::sched_getcpu() + 1); }

constexpr std::size_t index(Counter counter) { return static_cast<std::size_t>(counter); }

}  // namespace

Lines::Lines(const Segment& segment, int rank)
    : segment_(segment),
      header_(segment.header()),
      rank_(rank),
      size_(segment.size()),
      crowded_(header_.tuning.crowded != 0),
      spin_(std::chrono::microseconds(header_.tuning.spin_us)),
      waits_after_long_loan_(kFewestWaitsAfterLongLoan) {
  for (auto& seen : seen_) seen.resize(static_cast<std::size_t>(size_), 0);
}

template <class Fn>
bool Lines::all_peers(const Condition& condition, int waiter, Fn&& load) const noexcept {
  if (condition.peer != kEveryPeer) return condition.peer == waiter || load(condition.peer) >= condition.value;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != waiter && load(peer) < condition.value) return false;
  }
  return true;
}

bool Lines::reached(const Condition& condition) noexcept {
  auto& seen = seen_[index(condition.counter)];
  return all_peers(condition, rank_, [&](int peer) {
    auto& last = seen[static_cast<std::size_t>(peer)];
    if (last < condition.value) {
      last = segment_.control(peer).counters[index(condition.counter)].load(std::memory_order_acquire);
    }
    return last;
  });
}

bool Lines::reached_now(const Condition& condition) const noexcept {
  return all_peers(condition, rank_, [&](int peer) {
    return segment_.control(peer).counters[index(condition.counter)].load(std::memory_order_seq_cst);
  });
}

void Lines::publish(Counter counter, std::uint64_t value) noexcept {
  const std::uint64_t before = std::exchange(published_[index(counter)], value);
#if defined(PHALANX_SEED_MISSING_RELEASE)
  // A bug on purpose: tests/native/sanitize.py shows with it that the thread sanitizer would find one like it.
  constexpr auto order = std::memory_order_relaxed;
#else
  constexpr auto order = std::memory_order_seq_cst;
#endif
  Control& mine = segment_.control(rank_);
  mine.cpu.store(current_cpu(), std::memory_order_relaxed);
  mine.counters[index(counter)].store(value, order);
  if (header_.sleepers.load(std::memory_order_seq_cst) != 0) ring_if_complete(counter, before, value);
}

void Lines::ring_if_complete(Counter counter, std::uint64_t before, std::uint64_t now) noexcept {
  for (int waiter = 0; waiter < size_; ++waiter) {
    if (waiter == rank_) continue;
    WaitLine& line = segment_.wait_line(waiter);
    if (line.counter.load(std::memory_order_acquire) != index(counter) + 1) continue;
    const Condition condition{counter, line.peer.load(std::memory_order_relaxed),
                              line.value.load(std::memory_order_relaxed)};
    if (condition.peer != kEveryPeer && condition.peer != rank_) continue;
    // Only the step across the value can be the one that completes the condition.
    if (before >= condition.value || now < condition.value) continue;
    const bool complete = all_peers(condition, waiter, [&](int peer) {
      return segment_.control(peer).counters[index(counter)].load(std::memory_order_seq_cst);
    });
    if (complete) return ring();  // one ring wakes all; those who wait for something else go on waiting
  }
}

void Lines::ring() noexcept {
  header_.bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(header_.bell);
}

WaitResult Lines::look(const Condition& condition) const noexcept {
  if (reached_now(condition)) return WaitResult::reached;
  if (failed()) return WaitResult::failed;
  if (first_left(condition) >= 0) return WaitResult::left;
  return WaitResult::expired;
}

// A peer that was last seen on this CPU can't come while this thread spins on it.
bool Lines::worth_spinning(const Condition& condition) const noexcept {
  const std::uint32_t here = current_cpu();
  return here == 0 || all_peers(condition, rank_, [&](int peer) {
           const Control& control = segment_.control(peer);
           const bool late =
               control.counters[index(condition.counter)].load(std::memory_order_relaxed) < condition.value;
           return late && control.cpu.load(std::memory_order_relaxed) == here ? 0 : condition.value;
         });
}

// Burns or lends the CPU for a short while. True when the condition came true, or the group failed meanwhile.
bool Lines::spin(const Condition& condition, Clock::time_point until) noexcept {
  const auto start = Clock::now();
  until = std::min(until, start + spin_);
  if (!crowded_ && worth_spinning(condition)) {
    do {
      for (int i = 0; i < kSpinsBetweenLooks; ++i) {
        if (reached(condition)) return true;
        pause_cpu();
      }
    } while (!failed() && Clock::now() < until);
    return failed();
  }
  // The peer needs this CPU. Lending it is cheaper than sleeping, unless somebody else takes it for long.
  if (waits_without_lending_ > 0) {
    --waits_without_lending_;
    return false;
  }
  auto before = start;
  while (before < until) {
    ::sched_yield();
    if (reached(condition) || failed()) {
      waits_after_long_loan_ = kFewestWaitsAfterLongLoan;
      return true;
    }
    const auto now = Clock::now();
    if (now - before > kLongLoan) {
      waits_without_lending_ = waits_after_long_loan_;
      waits_after_long_loan_ = std::min(2 * waits_after_long_loan_, kMostWaitsAfterLongLoan);
      return false;
    }
    before = now;
  }
  return false;
}

WaitResult Lines::wait(const Condition& condition, Clock::time_point until) noexcept {
  if (spin(condition, until)) return look(condition);

  WaitLine& line = segment_.wait_line(rank_);
  line.peer.store(condition.peer, std::memory_order_relaxed);
  line.value.store(condition.value, std::memory_order_relaxed);
  line.counter.store(static_cast<std::uint32_t>(index(condition.counter)) + 1, std::memory_order_seq_cst);
  header_.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t bell = header_.bell.load(std::memory_order_seq_cst);
  WaitResult result = look(condition);
  if (result == WaitResult::expired) {
    const auto now = Clock::now();
    if (now < until) {
      const bool woken = futex_wait(header_.bell, bell, std::min<std::chrono::nanoseconds>(until - now, kLongestSleep));
      result = look(condition);
      if (!woken && result == WaitResult::expired) result = WaitResult::interrupted;
    }
  }
  header_.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  line.counter.store(0, std::memory_order_release);
  return result;
}

std::vector<int> Lines::missing(const Condition& condition) const {
  std::vector<int> peers;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || (condition.peer != kEveryPeer && condition.peer != peer)) continue;
    if (segment_.control(peer).counters[index(condition.counter)].load(std::memory_order_acquire) < condition.value) {
      peers.push_back(peer);
    }
  }
  return peers;
}

int Lines::first_left(const Condition& condition) const noexcept {
  int found = -1;
  all_peers(condition, rank_, [&](int peer) -> std::uint64_t {
    // In this order: a rank leaves after its last step, so one that is seen to have left has no step to come.
    const bool has_left = segment_.control(peer).left.load(std::memory_order_seq_cst) != 0;
    const std::uint64_t value =
        segment_.control(peer).counters[index(condition.counter)].load(std::memory_order_seq_cst);
    if (has_left && value < condition.value && found < 0) found = peer;
    return condition.value;  // go on to the next peer
  });
  return found;
}

void Lines::fail(const Failure& failure) noexcept {
  std::uint32_t none = 0;
  if (header_.failure_state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    header_.failure = failure;
    header_.failure_state.store(2, std::memory_order_seq_cst);
  }
  ring();
}

Failure Lines::failure() const {
  // Whoever claimed the record fills it at once, unless it was killed just there: then the wait must end all the same.
  const auto until = Clock::now() + std::chrono::milliseconds(100);
  while (header_.failure_state.load(std::memory_order_acquire) != 2) {
    if (Clock::now() > until) {
      Failure lost{};
      lost.kind = FailureKind::aborted;
      lost.rank = lost.peer = -1;
      std::strcpy(lost.text, "a rank died or was held up while it reported a failure");
      return lost;
    }
    std::this_thread::yield();
  }
  return header_.failure;
}

void Lines::leave() noexcept {
  segment_.control(rank_).left.store(1, std::memory_order_seq_cst);
  ring();
}

}  // namespace phalanx
