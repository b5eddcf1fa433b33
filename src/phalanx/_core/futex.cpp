#include "futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>

namespace phalanx {

namespace {

// As in newer versions of <linux/futex.h>.
constexpr long kSysFutexWaitv = 449;
constexpr std::uint32_t kSize32 = 2;
constexpr std::size_t kMostAtOnce = 128;
struct WaitOn {
  std::uint64_t value;
  std::uint64_t address;
  std::uint32_t flags;
  std::uint32_t reserved;
};

timespec to_timespec(std::chrono::nanoseconds time) noexcept {
  return {static_cast<time_t>(time.count() / 1'000'000'000), static_cast<long>(time.count() % 1'000'000'000)};
}

}  // namespace

bool futex_wait(const Bell& bell, std::chrono::nanoseconds timeout) noexcept {
  const timespec spec = to_timespec(timeout);
  // Shared (not private): those who ring are other processes.
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(bell.word), FUTEX_WAIT, bell.value, &spec, nullptr, 0) ==
             0 ||
         errno != EINTR;
}

void futex_wait_any(const std::vector<Bell>& bells, std::chrono::nanoseconds timeout,
                    std::chrono::nanoseconds short_sleep) noexcept {
  if (bells.size() > 1) {
    WaitOn waits[kMostAtOnce];
    const std::size_t num = std::min(bells.size(), kMostAtOnce);
    for (std::size_t i = 0; i < num; ++i) {
      waits[i] = {bells[i].value, reinterpret_cast<std::uint64_t>(bells[i].word), kSize32, 0};
    }
    if (num < bells.size()) timeout = std::min(timeout, short_sleep);
    const timespec until = to_timespec(Clock::now().time_since_epoch() + timeout);
    if (::syscall(kSysFutexWaitv, waits, num, 0, &until, CLOCK_MONOTONIC) >= 0 || errno == EAGAIN || errno == EINTR ||
        errno == ETIMEDOUT) {
      return;
    }
    // Linux before 5.16.
    timeout = std::min(timeout, short_sleep);
  }
  futex_wait(bells.front(), timeout);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept {
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void ring(std::atomic<std::uint32_t>& word) noexcept {
  word.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(word);
}

}  // namespace phalanx
