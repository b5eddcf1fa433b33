// Calls whose end somebody else wants to hear of: the tokens they left, for a thread that may run Python.
#pragma once

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
    came_.notify_one();
  }
  // Waits for a token. 0: there is none left, and none is waited for while it is closed.
  std::uint64_t next() {
    std::unique_lock lock(mutex_);
    came_.wait(lock, [&] { return !tokens_.empty() || closed_; });
    if (tokens_.empty()) return 0;
    const std::uint64_t token = tokens_.front();
    tokens_.pop_front();
    return token;
  }
  void set_closed(bool closed) {
    const std::lock_guard lock(mutex_);
    closed_ = closed;
    if (closed) came_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::uint64_t> tokens_;
  bool closed_ = false;
};

// The completions of this process.
Completions& completions();

}  // namespace phalanx
