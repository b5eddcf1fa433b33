#include "memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace phalanx {

namespace {

// As in newer versions of <sys/mman.h>: brings a page in as a write would, without writing.
constexpr int kPopulateWrite = 23;

bool page_is_writable(std::uintptr_t address) noexcept {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
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
  const auto first = reinterpret_cast<std::uintptr_t>(piece.data);
  return page_is_writable(first) && page_is_writable(first + piece.size - 1);
}

}  // namespace phalanx
