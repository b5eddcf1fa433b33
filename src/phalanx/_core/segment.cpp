#include "segment.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace phalanx {

namespace {

std::atomic<std::uint32_t> g_generation{0};

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

}  // namespace

std::uint32_t fork_generation() noexcept {
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { g_generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return g_generation.load(std::memory_order_relaxed);
}

Segment::Segment(void* base, std::size_t bytes, int fd)
    : base_(base), bytes_(bytes), fd_(fd), generation_(fork_generation()) {}

Segment::Segment(Segment&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      bytes_(other.bytes_),
      fd_(std::exchange(other.fd_, -1)),
      size_(other.size_),
      generation_(other.generation_),
      offsets_(other.offsets_) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this != &other) {
    release();
    base_ = std::exchange(other.base_, nullptr);
    bytes_ = other.bytes_;
    fd_ = std::exchange(other.fd_, -1);
    size_ = other.size_;
    generation_ = other.generation_;
    offsets_ = other.offsets_;
  }
  return *this;
}

Segment::~Segment() { release(); }

void Segment::release() noexcept {
  close_fd();
  // A forked child does not have the mapping (MADV_DONTFORK); something else may be at its address by now.
  if (base_ != nullptr && !forked()) ::munmap(base_, bytes_);
  base_ = nullptr;
}

void Segment::close_fd() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

bool Segment::reserve_channel(int from, int to) noexcept {
  if (header().reserved == 0) return true;
  const auto offset = static_cast<off_t>(offsets_.bodies + channel(from, to) * offsets_.body_stride);
  int error;
  do {
    error = ::posix_fallocate(fd_, offset, static_cast<off_t>(offsets_.body_stride));
  } while (error == EINTR);
  return error == 0;
}

bool Segment::forked() const noexcept { return generation_ != fork_generation(); }

Segment Segment::map(int fd, std::size_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail("mmap of the shared segment");
  ::madvise(base, bytes, MADV_DONTFORK);
  return Segment(base, bytes, fd);
}

void Segment::format(int size, const Tuning& tuning, const Nonce& nonce) {
  offsets_ = Offsets(size, tuning);
  size_ = size;
  // The memory is zero, which is the start value of every atomic in it; placement new makes them objects.
  auto* header = new (base_) Header{};
  header->version = kVersion;
  header->size = static_cast<std::uint32_t>(size);
  header->total_bytes = bytes_;
  header->tuning = tuning;
  std::memcpy(header->nonce, nonce.data(), nonce.size());
  header->magic = kMagic;
}

Segment Segment::create_memfd(int size, const Tuning& tuning, const Nonce& nonce) {
  Fd fd(::memfd_create("phalanx", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) fail("memfd_create");
  const std::size_t bytes = Offsets(size, tuning).total;
  if (::fchmod(fd.get(), 0600) != 0) fail("fchmod of the memfd");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) fail("ftruncate of the memfd");
  // A peer that truncated the segment would turn every access into a SIGBUS.
  ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  Segment segment = map(fd.get(), bytes);
  fd.release();
  segment.format(size, tuning, nonce);
  return segment;
}

Segment Segment::create_file(const std::string& path, int size, Tuning tuning, const Nonce& nonce) {
  Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (fd.get() < 0) fail("open of " + path);
  try {
    for (;; tuning.slot_bytes /= 2) {
      const auto bytes = static_cast<off_t>(Offsets(size, tuning).bodies);
      // Reserved space turns a full file system into an error here instead of a SIGBUS later.
      int error;
      do {
        error = ::posix_fallocate(fd.get(), 0, bytes);
      } while (error == EINTR);
      if (error == 0) break;
      if (::ftruncate(fd.get(), 0) != 0) fail("ftruncate of " + path);
      if (error != ENOSPC || tuning.slot_bytes / 2 < smallest_slot(size)) {
        throw std::system_error(error, std::generic_category(),
                                "reserving " + std::to_string(bytes) + " bytes in " + path);
      }
    }
    tuning.chunk_bytes = std::min(tuning.chunk_bytes, tuning.slot_bytes);
    tuning.one_shot_bytes = std::min(tuning.one_shot_bytes, tuning.slot_bytes);
    const std::size_t total = Offsets(size, tuning).total;
    if (::ftruncate(fd.get(), static_cast<off_t>(total)) != 0) fail("ftruncate of " + path);
    Segment segment = map(fd.get(), total);
    fd.release();
    segment.format(size, tuning, nonce);
    segment.header().reserved = 1;
    return segment;
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
}

Segment Segment::open(const std::string& path, const Nonce& nonce) {
  // The path may lead to anything: nothing here may wait, or take a terminal.
  Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (fd.get() < 0) fail("open of " + path);
  struct stat status;
  if (::fstat(fd.get(), &status) != 0) fail("fstat of " + path);
  // Read before mapping: the number in /proc may by chance be any other file of another process.
  Header header_bytes;
  if (!S_ISREG(status.st_mode) || static_cast<std::size_t>(status.st_size) < kPage ||
      ::pread(fd.get(), static_cast<void*>(&header_bytes), sizeof(Header), 0) != static_cast<ssize_t>(sizeof(Header)) ||
      header_bytes.magic != kMagic || std::memcmp(header_bytes.nonce, nonce.data(), nonce.size()) != 0) {
    throw std::runtime_error(path + " is not the segment of this group");
  }
  if (header_bytes.version != kVersion) {
    throw std::runtime_error("the segment has layout version " + std::to_string(header_bytes.version) +
                             ", this library has " + std::to_string(kVersion));
  }
  const std::size_t bytes = Offsets(static_cast<int>(header_bytes.size), header_bytes.tuning).total;
  if (header_bytes.total_bytes != bytes || static_cast<std::size_t>(status.st_size) < bytes) {
    throw std::runtime_error(path + " has the wrong size for a segment");
  }
  Segment segment = map(fd.get(), bytes);
  fd.release();
  segment.size_ = static_cast<int>(header_bytes.size);
  segment.offsets_ = Offsets(segment.size_, header_bytes.tuning);
  if (header_bytes.reserved == 0) segment.close_fd();
  return segment;
}

Segment Segment::create_private(int size, const Tuning& tuning) {
  const std::size_t bytes = Offsets(size, tuning).total;
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) fail("mmap");
  Segment segment(base, bytes, -1);
  segment.format(size, tuning, Nonce{});
  return segment;
}

}  // namespace phalanx
