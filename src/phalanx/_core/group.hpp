// One rank's end of a group: the calls it makes, one after another, and what became of them.
//
// Thread-safe: whoever starts a call holds the group until the call has ended. abort() may come from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "call.hpp"

namespace phalanx {

// Chooses chunk sizes and the way of waiting for so many ranks on so many CPUs.
Tuning tuning_for(int ranks, int cpus);

enum class Outcome {
  finished,
  pending,  // not yet; look at signals and call proceed() again
  failed,   // Group::failure() says how; the group is broken
};

class Group {
 public:
  Group(std::shared_ptr<Segment> segment, int rank);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Takes the group for a call; false when it was not free by then.
  bool try_acquire() { return own(free_.try_lock()); }
  bool acquire(Clock::time_point until) { return own(free_.try_lock_until(until)); }
  void release() {
    owner_.store({}, std::memory_order_relaxed);
    free_.unlock();
  }
  // Whether this very thread is in a call, which a signal handler has interrupted to make another one.
  bool held_here() const noexcept { return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

  // The one who has acquired the group fills request(), starts, and proceeds until the outcome is not `pending`.
  Request& request() noexcept { return request_; }
  void start(std::chrono::nanoseconds timeout);
  Outcome proceed(Clock::time_point until);

  // Ends the call of this rank and all waits of its peers. The text goes into their errors.
  void abort(const std::string& text);
  // This rank makes no further call; peers that wait for one are told.
  void leave();

  bool forked() const noexcept { return segment_->forked(); }
  bool broken() const noexcept { return lines_.failed(); }
  bool has_left() const noexcept { return left_; }
  Failure failure() const { return lines_.failure(); }
  std::uint64_t seq() const noexcept { return call_.seq(); }
  int rank() const noexcept { return lines_.rank(); }
  int size() const noexcept { return lines_.size(); }
  Segment& segment() noexcept { return *segment_; }

 private:
  bool own(bool locked) noexcept {
    if (locked) owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    return locked;
  }
  void report(FailureKind kind, int peer, const std::vector<int>& missing, const std::string& text);

  std::shared_ptr<Segment> segment_;
  Lines lines_;
  History history_;
  Request request_;
  Call call_;
  Clock::time_point deadline_;
  std::timed_mutex free_;
  std::atomic<std::thread::id> owner_{};
  std::atomic<bool> left_ = false;
};

}  // namespace phalanx
