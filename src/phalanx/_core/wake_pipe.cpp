#include "wake_pipe.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace phalanx {

bool WakePipe::open() noexcept {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return false;
  hear_ = ends[0];
  ring_ = ends[1];
  struct stat status{};
  ::fstat(hear_, &status);
  device_ = status.st_dev;
  inode_ = status.st_ino;
  return true;
}

void WakePipe::close() noexcept {
  for (int* end : {&hear_, &ring_}) {
    const int fd = std::exchange(*end, -1);
    if (is_ours(fd)) ::close(fd);
  }
}

bool WakePipe::ring() const noexcept {
  const char byte = 1;
  // A pipe that is full has rung.
  return is_ours(hear_) && is_ours(ring_) && (::write(ring_, &byte, 1) == 1 || errno == EAGAIN);
}

void WakePipe::quiet() const noexcept {
  char bytes[64];
  while (is_ours(hear_) && ::read(hear_, bytes, sizeof(bytes)) == sizeof(bytes)) {
  }
}

bool WakePipe::is_ours(int fd) const noexcept {
  struct stat status{};
  return fd >= 0 && ::fstat(fd, &status) == 0 && status.st_dev == device_ && status.st_ino == inode_;
}

}  // namespace phalanx
