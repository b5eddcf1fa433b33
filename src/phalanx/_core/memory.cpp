#include "memory.hpp"

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>

#include "futex.hpp"

namespace phalanx {

namespace {

// As in newer versions of <sys/mman.h>: brings a page in as a write would, without writing.
constexpr int kPopulateWrite = 23;

constexpr std::chrono::milliseconds kTimeToTrust{10};

std::uintptr_t page_size() noexcept {
  static const auto size = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

bool page_is_writable(std::uintptr_t address) noexcept {
  const std::uintptr_t page = page_size();
  const int before = errno;
  const bool refused = ::madvise(reinterpret_cast<void*>(address / page * page), page, kPopulateWrite) != 0 &&
                       (errno == EINVAL || errno == EFAULT || errno == ENOMEM);
  errno = before;
  return !refused;
}

bool system_tells() noexcept {
  int here = 0;
  return page_is_writable(reinterpret_cast<std::uintptr_t>(&here));
}

}  // namespace

bool writable(const Piece& piece) noexcept {
  static const bool tells = system_tells();
  if (!tells || piece.size == 0) return true;
  const auto first = reinterpret_cast<std::uintptr_t>(piece.data), last = first + piece.size - 1;
  if (first / page_size() != last / page_size()) return page_is_writable(first) && page_is_writable(last);
  // Small messages are received into the same memory again and again; asking takes as long as sending them.
  thread_local std::uintptr_t known_page = 0;
  thread_local Clock::time_point known_until;
  const auto now = Clock::now();
  if (first / page_size() == known_page && now < known_until) return true;
  if (!page_is_writable(first)) return false;
  known_page = first / page_size();
  known_until = now + kTimeToTrust;
  return true;
}

std::string readable_bytes(const void* address, std::size_t num) {
  std::string bytes(num, '\0');
  const iovec here{bytes.data(), bytes.size()};
  const iovec there{const_cast<void*>(address), bytes.size()};
  const ssize_t read = ::process_vm_readv(::getpid(), &here, 1, &there, 1, 0);
  bytes.resize(read > 0 ? static_cast<std::size_t>(read) : 0);
  return bytes;
}

}  // namespace phalanx
