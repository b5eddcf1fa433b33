// Calls whose end somebody else wants to hear of: the tokens they left, for threads that may run Python.
//
// One thread at a time takes tokens, as long as there are any: each that wakes up costs context switches, and with them
// a fight for Python's lock. A callback may wait for a call whose token is still here. So another thread watches, and
// takes over when the first one does not come back.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>

namespace phalanx {

class Completions {
 public:
  void push(std::uint64_t token) {
    const std::lock_guard lock(mutex_);
    tokens_.push_back(token);
    if (num_busy_ == 0 || num_watching_ == 0) came_.notify_one();
  }
  // Waits for a token. 0: there is none left, and none is waited for while it is closed.
  //
  // `had`: the caller took one before, and is through with it. `gathers`: many more are to come; if there is none yet,
  // the caller waits for a moment, so that it finds several.
  std::uint64_t next(bool had, bool gathers) {
    std::unique_lock lock(mutex_);
    if (had && gathers && tokens_.empty()) closing_.wait_for(lock, kGathering, [&] { return closed_; });
    if (had) end_busy();
    bool takes = had;
    while (tokens_.empty() || !(takes || num_busy_ == 0)) {
      if (tokens_.empty() && closed_) return 0;
      if (num_busy_ == 0) {
        came_.wait(lock);
        takes = false;
      } else {
        takes = watch(lock);
      }
    }
    return take();
  }
  // The same without waiting; 0 also where the caller would have to wait, and has not been heard then.
  std::uint64_t next_at_once(bool had) {
    const std::lock_guard lock(mutex_);
    if (tokens_.empty() || !had) return 0;
    end_busy();
    return take();
  }
  // Of a thread that took a token and does not come for another.
  void leave() {
    const std::lock_guard lock(mutex_);
    end_busy();
    if (!tokens_.empty()) came_.notify_one();
  }
  void set_closed(bool closed) {
    const std::lock_guard lock(mutex_);
    closed_ = closed;
    if (closed) came_.notify_all();
    if (closed) closing_.notify_all();
  }

 private:
  static constexpr std::chrono::milliseconds kGathering{1};
  // A thread that took a token and has not come back for the next one by then is in a long callback.
  static constexpr std::chrono::milliseconds kLongCallback{2};

  std::uint64_t take() {
    const std::uint64_t token = tokens_.front();
    tokens_.pop_front();
    ++num_busy_;
    ++num_taken_;
    return token;
  }
  // A forked child has the thread, but not what it took.
  void end_busy() noexcept { num_busy_ -= num_busy_ > 0 ? 1 : 0; }
  // Whether those who are busy have taken nothing for a while.
  bool watch(std::unique_lock<std::mutex>& lock) {
    const std::uint64_t num_taken = num_taken_;
    ++num_watching_;
    came_.wait_for(lock, kLongCallback);
    --num_watching_;
    return num_taken == num_taken_;
  }

  std::mutex mutex_;
  std::condition_variable came_, closing_;
  std::deque<std::uint64_t> tokens_;
  int num_busy_ = 0;      // threads that took a token and have not come back
  int num_watching_ = 0;  // threads that look after those
  std::uint64_t num_taken_ = 0;
  bool closed_ = false;
};

// The completions of this process.
Completions& completions();

}  // namespace phalanx
