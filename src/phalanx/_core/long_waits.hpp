// The waits of this process that have lasted for long: for which call each thread waits. Whoever looks for deadlocks
// reads them (debug/deadlocks.py).
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "futex.hpp"
#include "ops.hpp"

namespace phalanx {

struct WaitingThread {
  std::uint64_t id = 0;
  pid_t thread = 0;
  std::uint64_t group = 0;  // GroupEnd::token
  Op op = Op::barrier;
  std::uint64_t seq = 0;
  int peer = 0;  // of a message
  std::uint32_t tag = 0;
  bool is_bounded = false;  // the thread goes on after a while, whatever becomes of the call
  Clock::time_point since{};
  std::string where;  // the line of the program that made the call
};

// Thread-safe. No lock is held while anything else is called.
class LongWaits {
 public:
  // A wait is registered once it has lasted this long: shorter ones cost nothing. Tests change it.
  static Clock::duration threshold() noexcept { return Clock::duration(threshold_.load(std::memory_order_relaxed)); }
  static void set_threshold(Clock::duration duration) noexcept {
    threshold_.store(duration.count(), std::memory_order_relaxed);
  }

  std::uint64_t add(WaitingThread wait);
  void remove(std::uint64_t id) noexcept;
  std::vector<WaitingThread> all() const;

 private:
  static constexpr Clock::duration kThreshold = std::chrono::seconds(1);
  static inline std::atomic<Clock::rep> threshold_{kThreshold.count()};

  mutable std::mutex mutex_;
  std::uint64_t last_id_ = 0;
  std::vector<WaitingThread> waits_;
};

// Those of this process.
LongWaits& long_waits();

}  // namespace phalanx
