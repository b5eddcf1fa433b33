// How long a waiter keeps its CPU busy before it sleeps.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "futex.hpp"
#include "layout.hpp"

namespace phalanx {

inline void pause_cpu() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// The CPU this thread runs on, plus 1; 0 where the system does not tell.
inline std::uint32_t current_cpu() noexcept { return static_cast<std::uint32_t>(::sched_getcpu() + 1); }

class Patience {
 public:
  explicit Patience(const Tuning& tuning) noexcept
      : crowded_(tuning.crowded != 0), spin_(std::chrono::microseconds(tuning.spin_us)) {}

  // Burns or lends the CPU for a short while; true when `came()` did meanwhile. A peer that was last seen on this CPU
  // (`shares_cpu()`) can't come while this thread spins on it.
  template <class Came, class SharesCpu>
  bool spin(Clock::time_point until, SharesCpu&& shares_cpu, Came&& came) noexcept {
    const auto start = Clock::now();
    until = std::min(until, start + spin_);
    if (!crowded_ && !shares_cpu()) {
      do {
        for (int i = 0; i < kSpinsBetweenLooks; ++i) {
          if (came()) return true;
          pause_cpu();
        }
      } while (Clock::now() < until);
      return false;
    }
    return lend(start, until, came);
  }
  // The same for one that must not burn the CPU.
  template <class Came>
  bool only_lend(Came&& came) noexcept {
    const auto start = Clock::now();
    return lend(start, start + spin_, came);
  }

 private:
  static constexpr int kSpinsBetweenLooks = 64;
  // A CPU that comes back so late was taken by a program that computes, not by a peer.
  static constexpr std::chrono::microseconds kLongLoan{500};
  static constexpr int kFewestWaitsAfterLongLoan = 4;
  static constexpr int kMostWaitsAfterLongLoan = 256;

  // Lending the CPU to the peer that needs it is cheaper than sleeping, unless somebody else takes it for long.
  template <class Came>
  bool lend(Clock::time_point before, Clock::time_point until, Came&& came) noexcept {
    if (waits_without_lending_ > 0) {
      --waits_without_lending_;
      return false;
    }
    while (before < until) {
      ::sched_yield();
      if (came()) {
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

  const bool crowded_;
  const std::chrono::nanoseconds spin_;
  // How many waits will not lend the CPU, and how many it will be after the next loan that lasts too long.
  int waits_without_lending_ = 0;
  int waits_after_long_loan_ = kFewestWaitsAfterLongLoan;
};

}  // namespace phalanx
