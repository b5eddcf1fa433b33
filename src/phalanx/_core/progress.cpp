#include "progress.hpp"

#include <pthread.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "completions.hpp"
#include "per_process.hpp"
#include "without_signals.hpp"

namespace phalanx {

namespace {

constinit PerProcess<Progress> g_progress;
constinit PerProcess<Completions> g_completions;

constexpr std::chrono::milliseconds kNap{4};
constexpr std::chrono::seconds kSleepOfTheIdle{60};

}  // namespace

Progress& progress() { return g_progress.get(); }

Completions& completions() { return g_completions.get(); }

void Progress::add(std::shared_ptr<Tendable> lane) {
  const std::lock_guard lock(lanes_mutex_);
  lanes_.push_back(std::move(lane));
}

void Progress::remove(const std::shared_ptr<Tendable>& lane) {
  const std::lock_guard lock(thread_mutex_);
  {
    const std::lock_guard lanes_lock(lanes_mutex_);
    std::erase(lanes_, lane);
    if (!thread_.joinable()) return;
    // It may sleep on a bell of this lane, and keep the group until it wakes.
    if (!lanes_.empty()) return wake_thread(false);
    running_.store(false, std::memory_order_seq_cst);
    stop_.store(true, std::memory_order_seq_cst);
  }
  wake_thread(true);
  thread_.join();
  stop_.store(false, std::memory_order_seq_cst);
}

void Progress::wake(bool urgent) {
  if (!running_.load(std::memory_order_acquire)) start();
  wake_thread(urgent);
}

void Progress::wake_thread(bool urgent) noexcept {
  if (urgent) urgent_.fetch_add(1, std::memory_order_seq_cst);
  bell_.fetch_add(1, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst)) futex_wake_all(bell_);
  if (urgent && naps_.load(std::memory_order_seq_cst)) futex_wake_all(urgent_);
}

void Progress::start() {
  const std::lock_guard lock(thread_mutex_);
  const std::lock_guard lanes_lock(lanes_mutex_);
  if (lanes_.empty() || thread_.joinable()) return;
  const WithoutSignals without;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    // Calls go on when somebody waits for them, or when the next one comes.
    error_.store(error.code().value(), std::memory_order_relaxed);
    return;
  }
  ::pthread_setname_np(thread_.native_handle(), "phalanx");
  error_.store(0, std::memory_order_relaxed);
  running_.store(true, std::memory_order_release);
}

Tendable::Tended Progress::tend_all(bool urgent, Sleep& sleep) {
  {
    const std::lock_guard lock(lanes_mutex_);
    tended_ = lanes_;
  }
  bool more = false;
  bool alone = false;
  pending_ = false;
  for (const auto& lane : tended_) {
    const Tendable::Tended tended = lane->tend(urgent, sleep);
    more = more || tended == Tendable::Tended::more;
    alone = alone || tended == Tendable::Tended::alone;
    pending_ = pending_ || !lane->idle();
  }
  // Bells lie in the memory of groups, which stays while this thread sleeps on them. Without any, no group is kept.
  if (sleep.bells.size() == 1) tended_.clear();
  return more ? Tendable::Tended::more : alone ? Tendable::Tended::alone : Tendable::Tended::done;
}

// Until something urgent comes, which may have come since it was last looked for.
void Progress::nap() noexcept {
  naps_.store(true, std::memory_order_seq_cst);
  futex_wait({&urgent_, urgent_seen_}, kNap);
  naps_.store(false, std::memory_order_seq_cst);
}

void Progress::run() {
  Sleep sleep;
  bool tired = true;
  while (true) {
    const std::uint32_t before = bell_.load(std::memory_order_seq_cst);
    if (tired) nap();
    const std::uint32_t urgent = urgent_.load(std::memory_order_seq_cst);
    const bool is_urgent = urgent != std::exchange(urgent_seen_, urgent);
    const std::uint32_t seen = bell_.load(std::memory_order_seq_cst);
    sleep.bells.assign(1, Bell{&bell_, seen});
    sleep.until = Clock::time_point::max();
    // After the bell was read: a stop that came before its ring was read is not slept over.
    if (stop_.load(std::memory_order_seq_cst)) break;
    const Tendable::Tended tended = tend_all(is_urgent, sleep);
    // Calls come and go, and those who made them see to them.
    tired = tended == Tendable::Tended::alone ||
            (tended == Tendable::Tended::done && !pending_ && bell_.load(std::memory_order_seq_cst) != before);
    if (tired || tended == Tendable::Tended::more) continue;
    asleep_.store(true, std::memory_order_seq_cst);
    const std::chrono::nanoseconds longest = pending_ ? std::chrono::nanoseconds(kLongestSleep) : kSleepOfTheIdle;
    const std::chrono::nanoseconds left = sleep.until - Clock::now();
    if (left.count() > 0) futex_wait_any(sleep.bells, std::min(longest, left));
    asleep_.store(false, std::memory_order_seq_cst);
    // While something is pending anyway, what comes is looked at with it.
    tired = !pending_;
  }
  tended_.clear();
  pending_ = false;
}

}  // namespace phalanx
