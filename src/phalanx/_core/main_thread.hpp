// The main thread of this process: the one that runs Python's signal handlers, and the one that peers ask about.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "segment.hpp"

namespace phalanx {

// Asks the system once per thread, and once more after a fork: then the thread that forked is the main one.
inline bool on_main_thread() {
  thread_local std::uint32_t asked_in = 0;
  thread_local bool is_main = false;
  if (asked_in != fork_generation() + 1) {
    is_main = ::syscall(SYS_gettid) == ::getpid();
    asked_in = fork_generation() + 1;
  }
  return is_main;
}

// While the main thread waits in a call of ours: peers ask where it is, and plain calls have no Python frame that would
// tell. Other threads may have one, too; it has no effect.
class InCall {
 public:
  InCall() : counts_(on_main_thread()), before_(counts_ ? generation_.load(std::memory_order_relaxed) : 0) {
    if (counts_) generation_.store(fork_generation() + 1, std::memory_order_relaxed);
  }
  ~InCall() {
    if (counts_) generation_.store(before_, std::memory_order_relaxed);
  }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

  // From any thread.
  static bool is_main_thread_waiting() noexcept {
    return generation_.load(std::memory_order_relaxed) == fork_generation() + 1;
  }

 private:
  // The generation of forks in which the main thread waits, plus 1; 0: it does not.
  static inline std::atomic<std::uint32_t> generation_{0};

  const bool counts_;
  const std::uint32_t before_;
};

}  // namespace phalanx
