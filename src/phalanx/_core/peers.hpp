// The processes behind the other ranks: whether they are alive, and how they ended.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "layout.hpp"

namespace phalanx {

// A program in a process: process numbers are used again, a number and a start time are not, and exec changes neither.
// But every program gets its stack at another, random address. Where the system does not randomize addresses, an exec
// of the same command line goes unnoticed.
struct Identity {
  pid_t pid = 0;
  std::uint64_t start = 0;
  std::uint64_t program = 0;  // the address of its stack; 0: unknown
};

Identity own_identity();

// A process that this one watches, through a pidfd that all groups share.
//
// The pidfd only says when to look closely: the program may have closed it and opened another file under its number.
// What /proc says about the process decides.
class Peer {
 public:
  // nullptr where it can't be watched: the system does not allow it, or it is this very process.
  static std::shared_ptr<Peer> watch(const Identity& identity);

  static std::vector<std::shared_ptr<Peer>> watch_all(const std::vector<Identity>& identities);

  Peer(const Identity& identity, int pidfd, bool dead);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  const Identity& identity() const noexcept { return identity_; }
  // To sleep on; negative where there is none. It may be another one after dead() has looked.
  int pidfd() const noexcept { return pidfd_.load(std::memory_order_relaxed); }
  // The program has ended, or another one runs in its process.
  bool dead() noexcept;
  // Dead, or the kernel is ending it: that closes its files a moment before the process counts as dead.
  bool ending() noexcept;
  // As of the last look, without a system call.
  bool known_dead() const noexcept { return fate_.load(std::memory_order_acquire) != Fate::alive; }
  // Dead because the process called exec.
  bool replaced() const noexcept { return fate_.load(std::memory_order_acquire) == Fate::replaced; }
  // The command line of what the process runs now; empty where that can't be seen.
  std::string command_line() const;
  // For a process that is about to end: whether it has, or was given time enough since this was first asked.
  bool ended_or_late() noexcept;
  // How it ended, as waitpid gives it; kUnknownStatus where that can't be seen (any more).
  std::int32_t status() noexcept;

 private:
  enum class Fate { alive, ended, replaced };
  Fate find_fate(bool fired) const noexcept;

  const Identity identity_;
  std::mutex mutex_;  // of a close look
  std::atomic<int> pidfd_;
  std::atomic<Fate> fate_;
  std::atomic<std::int64_t> next_look_{0};
  std::atomic<std::int32_t> status_{kUnknownStatus};
  std::atomic<std::int64_t> first_asked_{0};  // see ended_or_late()
};

}  // namespace phalanx
