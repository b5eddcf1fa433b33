// The thread that carries on with calls nobody waits for. One per process, started when it is first needed.
//
// It holds a lane only while there is something to do in it, sleeps until a bell of any lane rings, and never spins:
// the CPUs belong to the program. A short call has done what its peers need of it when it is handed over, and most of
// them are waited for right away. So the thread naps before it looks at one: without that it would take the CPU from
// the very waiter, call after call.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "futex.hpp"

namespace phalanx {

// What the thread sleeps on, and until when at most.
struct Sleep {
  std::vector<Bell> bells;
  Clock::time_point until;
};

// What the thread looks after: a lane (lane.hpp), or an agreement (agreement.hpp).
class Tendable {
 public:
  Tendable() = default;
  virtual ~Tendable() = default;
  Tendable(const Tendable&) = delete;
  Tendable& operator=(const Tendable&) = delete;

  enum class Tended {
    done,   // `sleep` has what to sleep on, unless another thread holds the lane, or there is nothing to do
    more,   // there is more to do at once
    alone,  // others have ended calls of this lane since the last time, and will go on doing so; look again soon
  };
  // Does what can be done without waiting.
  virtual Tended tend(bool urgent, Sleep& sleep) = 0;
  // Nothing is pending.
  virtual bool idle() const noexcept = 0;
};

class Progress {
 public:
  // Lanes that must be tended whenever something is pending in them.
  void add(std::shared_ptr<Tendable> lane);
  // The lane is left alone from its next turn on. With the last lane the thread ends.
  void remove(const std::shared_ptr<Tendable>& lane);
  // Something is pending in some lane. If it is not urgent, who handed it over may be about to wait for it.
  void wake(bool urgent);
  // Why the thread could not be started, as an error number; 0: it could, or was not needed.
  int error() const noexcept { return error_.load(std::memory_order_relaxed); }

 private:
  void start();
  void wake_thread(bool urgent) noexcept;
  void run();
  Tendable::Tended tend_all(bool urgent, Sleep& sleep);
  void nap() noexcept;

  std::mutex lanes_mutex_;
  std::vector<std::shared_ptr<Tendable>> lanes_;
  std::mutex thread_mutex_;  // taken before the other
  std::thread thread_;
  std::atomic<bool> running_{false};
  std::atomic<bool> stop_{false};
  std::atomic<int> error_{0};

  std::atomic<std::uint32_t> bell_{0};    // rings for whatever is pending
  std::atomic<std::uint32_t> urgent_{0};  // rings for what does not wait for the end of a nap
  std::atomic<bool> asleep_{false};
  std::atomic<bool> naps_{false};

  // Of the thread alone.
  std::vector<std::shared_ptr<Tendable>> tended_;
  bool pending_ = false;
  std::uint32_t urgent_seen_ = 0;
};

// That of this process.
Progress& progress();

}  // namespace phalanx
