#include "last_look.hpp"

#include <poll.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <cerrno>

#include "segment.hpp"

namespace phalanx {

namespace {

// How long SIGTERM may be held up, in milliseconds: a watcher that gets a CPU answers in far less than one.
constexpr int kMostMilliseconds = 200;

std::atomic<const WakePipe*> g_pipe{nullptr};
// Of the process that offered the pipe: a forked child inherits the handler and the pipe, but has no watcher.
std::atomic<std::uint32_t> g_generation{0};
std::atomic<int> g_num_ringing{0};
std::atomic<std::uint32_t> g_asked{0};
std::atomic<std::uint32_t> g_answered{0};

// True if somebody heard it. Sequentially consistent, as withdraw_last_look() is: either it waits for this handler, or
// this handler sees that the pipe is gone.
bool ring() noexcept {
  g_num_ringing.fetch_add(1, std::memory_order_seq_cst);
  const WakePipe* pipe = g_pipe.load(std::memory_order_seq_cst);
  const bool is_heard = pipe != nullptr && pipe->ring();
  g_num_ringing.fetch_sub(1, std::memory_order_seq_cst);
  return is_heard;
}

void on_sigterm(int number) {
  const int error = errno;
  if (g_generation.load(std::memory_order_seq_cst) == fork_generation()) {
    const std::uint32_t asked = g_asked.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (ring()) {
      for (int waited = 0; waited < kMostMilliseconds; ++waited) {
        if (static_cast<std::int32_t>(g_answered.load(std::memory_order_acquire) - asked) >= 0) break;
        ::poll(nullptr, 0, 1);
      }
    }
  }
  errno = error;
  // SA_RESETHAND has restored the default action; the signal arrives when this handler returns.
  ::raise(number);
}

}  // namespace

void offer_last_look(const WakePipe& pipe) noexcept {
  // A thread of the parent may have been ringing when it forked.
  if (g_generation.exchange(fork_generation(), std::memory_order_seq_cst) != fork_generation()) {
    g_num_ringing.store(0, std::memory_order_seq_cst);
  }
  g_pipe.store(&pipe, std::memory_order_seq_cst);
  struct sigaction before{};
  if (::sigaction(SIGTERM, nullptr, &before) != 0 || (before.sa_flags & SA_SIGINFO) != 0) return;
  if (before.sa_handler != SIG_DFL) return;
  struct sigaction ours{};
  ours.sa_handler = on_sigterm;
  ours.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
  ::sigemptyset(&ours.sa_mask);
  ::sigaction(SIGTERM, &ours, nullptr);
}

void withdraw_last_look() noexcept {
  g_pipe.store(nullptr, std::memory_order_seq_cst);
  // A handler that has interrupted this thread has ended before this goes on, so this waits for other threads only.
  while (g_num_ringing.load(std::memory_order_seq_cst) != 0) ::sched_yield();
}

std::uint32_t num_last_looks() noexcept { return g_asked.load(std::memory_order_acquire); }

void answer_last_looks(std::uint32_t number) noexcept { g_answered.store(number, std::memory_order_release); }

}  // namespace phalanx
