// A pipe that wakes a thread which sleeps in poll().
//
// Programs may close descriptors that they did not open, and open other files under the same numbers. So it knows
// its pipe by inode, and never writes to, reads from or closes a file that took one of its numbers. A sleeper wakes
// when somebody closes the end that rings.
#pragma once

#include <sys/types.h>

namespace phalanx {

class WakePipe {
 public:
  // False where the system has no more files.
  bool open() noexcept;
  // By the thread that opened it, when nobody else uses it any more.
  void close() noexcept;
  // To sleep on. Negative where the pipe is gone: then nobody can wake a sleeper.
  int fd() const noexcept { return is_ours(hear_) && is_ours(ring_) ? hear_ : -1; }
  // Safe in a signal handler. True if the sleeper wakes.
  bool ring() const noexcept;
  // Silence, until the next ring().
  void quiet() const noexcept;

 private:
  bool is_ours(int fd) const noexcept;

  int hear_ = -1;
  int ring_ = -1;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

}  // namespace phalanx
