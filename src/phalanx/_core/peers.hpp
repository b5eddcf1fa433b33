// The processes behind the other ranks: whether they are alive, and how they ended.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "layout.hpp"

namespace phalanx {

// A process for all time: numbers are used again, a number and a start time are not.
struct Identity {
  pid_t pid = 0;
  std::uint64_t start = 0;
};

Identity own_identity();

// A process that this one keeps an eye on, through a pidfd that all groups share.
class Peer {
 public:
  // nullptr where it can't be watched: the system does not allow it, or it is this very process.
  static std::shared_ptr<Peer> watch(const Identity& identity);

  Peer(const Identity& identity, int pidfd, bool dead) noexcept : identity_(identity), pidfd_(pidfd), dead_(dead) {}
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  bool dead() noexcept;
  // As of the last look, without a system call.
  bool known_dead() const noexcept { return dead_.load(std::memory_order_acquire); }
  // For a process that is about to end: whether it has, or was given time enough since this was first asked.
  bool ended_or_late() noexcept;
  // How it ended, as waitpid gives it; kUnknownStatus where that can't be seen (any more).
  std::int32_t status() noexcept;

 private:
  const Identity identity_;
  const int pidfd_;
  std::atomic<bool> dead_;
  std::atomic<std::int32_t> status_{kUnknownStatus};
  std::atomic<std::int64_t> first_asked_{0};  // see ended_or_late()
};

}  // namespace phalanx
