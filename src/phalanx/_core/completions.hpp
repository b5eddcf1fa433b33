// Calls whose end somebody else wants to hear of: the tokens they left, for a thread that may run Python.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace phalanx {

class Completions {
 public:
  void push(std::uint64_t token) {
    const std::lock_guard lock(mutex_);
    tokens_.push_back(token);
    came_.notify_one();
  }
  // Waits for tokens; none when close() ended the wait.
  std::vector<std::uint64_t> next() {
    std::unique_lock lock(mutex_);
    came_.wait(lock, [&] { return !tokens_.empty() || closed_; });
    closed_ = closed_ && !tokens_.empty();
    return std::exchange(tokens_, {});
  }
  // Ends one wait, this or the next, when all tokens have been given out.
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    came_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::vector<std::uint64_t> tokens_;
  bool closed_ = false;
};

// The completions of this process.
Completions& completions();

}  // namespace phalanx
