#include "progress.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "per_process.hpp"

namespace phalanx {

namespace {

constinit PerProcess<Progress> g_progress;
constinit PerProcess<Completions> g_completions;

// Signals are the program's: its own threads take them.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~WithoutSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Progress& progress() { return g_progress.get(); }

Completions& completions() { return g_completions.get(); }

void Progress::add(std::shared_ptr<Lane> lane) {
  const std::lock_guard lock(lanes_mutex_);
  lanes_.push_back(std::move(lane));
}

void Progress::remove(const std::shared_ptr<Lane>& lane) {
  const std::lock_guard lock(thread_mutex_);
  {
    const std::lock_guard lanes_lock(lanes_mutex_);
    std::erase(lanes_, lane);
    if (!lanes_.empty() || !thread_.joinable()) return;
    running_.store(false, std::memory_order_seq_cst);
    stop_.store(true, std::memory_order_seq_cst);
  }
  ring(bell_);
  thread_.join();
  stop_.store(false, std::memory_order_seq_cst);
}

void Progress::wake() {
  if (!running_.load(std::memory_order_acquire)) start();
  bell_.fetch_add(1, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst)) futex_wake_all(bell_);
}

void Progress::start() {
  const std::lock_guard lock(thread_mutex_);
  const std::lock_guard lanes_lock(lanes_mutex_);
  if (lanes_.empty() || thread_.joinable()) return;
  const WithoutSignals without;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {
    return;  // no more threads to be had: calls go on when somebody waits for them, or when the next one comes
  }
  ::pthread_setname_np(thread_.native_handle(), "phalanx");
  running_.store(true, std::memory_order_release);
}

void Progress::run() {
  std::vector<std::shared_ptr<Lane>> lanes;
  std::vector<Bell> bells;
  while (!stop_.load(std::memory_order_seq_cst)) {
    bells.assign(1, Bell{&bell_, bell_.load(std::memory_order_seq_cst)});
    {
      const std::lock_guard lock(lanes_mutex_);
      lanes = lanes_;
    }
    bool more = false;
    bool pending = false;
    for (const auto& lane : lanes) {
      more = lane->tend(bells) || more;
      pending = pending || !lane->idle();
    }
    if (more) continue;
    // Bells lie in the memory of groups, which stays for the short sleep that something pending has.
    if (!pending) lanes.clear();
    asleep_.store(true, std::memory_order_seq_cst);
    futex_wait_any(bells, pending ? kLongestSleep : std::chrono::milliseconds(60'000));
    asleep_.store(false, std::memory_order_seq_cst);
  }
}

}  // namespace phalanx
