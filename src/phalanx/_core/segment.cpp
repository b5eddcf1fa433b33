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
#include <optional>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace phalanx {

namespace {

std::atomic<std::uint32_t> g_generation{0};

// As in newer versions of <sys/mman.h> (Linux 5.14).
constexpr int kPopulateWrite = 23;

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

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw std::runtime_error(path + " " + why);
}

constexpr std::string_view kDigits = "0123456789";
constexpr std::string_view kHexDigits = "0123456789abcdef";

// Whether a path consists of these parts: a text, one or more of these characters, and so on.
template <class... More>
bool has_shape(std::string_view path, std::string_view text, std::string_view characters, More... more) {
  if (!path.starts_with(text)) return false;
  path.remove_prefix(text.size());
  const std::size_t end = std::min(path.find_first_not_of(characters), path.size());
  if (end == 0) return false;
  path.remove_prefix(end);
  if constexpr (sizeof...(More) > 0) {
    return has_shape(path, more...);
  } else {
    return path.empty();
  }
}

struct stat stat_of(int fd, const std::string& path) {
  struct stat status;
  if (::fstat(fd, &status) != 0) fail("fstat of " + path);
  return status;
}

// Payload must not go to memory that another user can read, nor come from memory that another user can write.
void check_owner(const struct stat& status, const std::string& path) {
  if (!S_ISREG(status.st_mode)) refuse(path, "is not the segment of this group: it is not a regular file");
  if (status.st_uid != ::geteuid()) {
    refuse(path, "belongs to user " + std::to_string(status.st_uid) + ", this process runs as user " +
                     std::to_string(::geteuid()));
  }
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) refuse(path, "is open to other users");
}

// Whether sizes computed of it can't overflow, and slots hold what is put into them.
bool makes_sense(const Tuning& tuning) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 30;
  return tuning.slot_bytes > 0 && tuning.slot_bytes <= kMost && tuning.chunk_bytes > 0 &&
         tuning.chunk_bytes <= tuning.slot_bytes && tuning.one_shot_bytes <= tuning.slot_bytes &&
         tuning.message_chunk_bytes > 0 && tuning.message_chunk_bytes <= kMost && tuning.check <= Check::full &&
         tuning.purpose <= Purpose::posting;
}

}  // namespace

std::uint32_t fork_generation() noexcept {
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { g_generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return g_generation.load(std::memory_order_relaxed);
}

Segment::Segment(void* base, std::size_t bytes, int fd)
    : base_(base), bytes_(bytes), fd_(fd), generation_(fork_generation()) {
  struct stat found;
  if (::fstat(fd, &found) == 0) {
    inode_ = found.st_ino;
    device_ = found.st_dev;
  }
}

Segment::Segment(Segment&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      bytes_(other.bytes_),
      fd_(std::exchange(other.fd_, -1)),
      size_(other.size_),
      generation_(other.generation_),
      inode_(other.inode_),
      device_(other.device_),
      offsets_(other.offsets_),
      seating_(std::move(other.seating_)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this != &other) {
    release();
    base_ = std::exchange(other.base_, nullptr);
    bytes_ = other.bytes_;
    fd_ = std::exchange(other.fd_, -1);
    size_ = other.size_;
    generation_ = other.generation_;
    inode_ = other.inode_;
    device_ = other.device_;
    offsets_ = other.offsets_;
    seating_ = std::move(other.seating_);
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
  if (owns_fd()) ::close(fd_);
  fd_ = -1;
}

// The program may have closed all descriptors that it did not know, and opened another file under this number.
bool Segment::owns_fd() const noexcept {
  struct stat found;
  return fd_ >= 0 && ::fstat(fd_, &found) == 0 && found.st_ino == inode_ && found.st_dev == device_;
}

bool Segment::reserve_channel(Seat from, Seat to) noexcept {
  if (header().reserved == 0) return true;
  const auto offset = static_cast<off_t>(offsets_.bodies + channel(from, to) * offsets_.body_stride);
  int error;
  do {
    if (owns_fd()) {
      error = ::posix_fallocate(fd_, offset, static_cast<off_t>(offsets_.body_stride));
    } else {
      auto* const start = static_cast<std::byte*>(base_) + offset;
      error = ::madvise(start, offsets_.body_stride, kPopulateWrite) == 0 ? 0 : errno;
    }
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

void Segment::format(const Seating& seating, const Tuning& tuning, const Nonce& nonce) {
  offsets_ = Offsets(seating.size(), tuning);
  size_ = seating.size();
  seating_ = seating;
  // The memory is zero, which is the start value of every atomic in it; placement new makes them objects.
  auto* header = new (base_) Header{};
  header->version = kVersion;
  header->size = static_cast<std::uint32_t>(size_);
  header->total_bytes = bytes_;
  header->tuning = tuning;
  std::memcpy(header->nonce, nonce.data(), nonce.size());
  std::memcpy(at<std::int32_t>(offsets_.ranks), seating.ranks().data(), seating.ranks().size() * sizeof(std::int32_t));
  header->magic = kMagic;
}

Segment Segment::create_memfd(const Seating& seating, const Tuning& tuning, const Nonce& nonce) {
  Fd fd(::memfd_create("phalanx", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) fail("memfd_create");
  const std::size_t bytes = Offsets(seating.size(), tuning).total;
  if (::fchmod(fd.get(), 0600) != 0) fail("fchmod of the memfd");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) fail("ftruncate of the memfd");
  // A peer that truncated the segment would turn every access into a SIGBUS.
  ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  Segment segment = map(fd.get(), bytes);
  fd.release();
  segment.format(seating, tuning, nonce);
  return segment;
}

Segment Segment::create_file(const std::string& path, const Seating& seating, Tuning tuning, const Nonce& nonce) {
  const int size = seating.size();
  Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (fd.get() < 0) fail("open of " + path);
  try {
    for (;; tuning.slot_bytes /= 2) {
      const Offsets offsets(size, tuning);
      const auto bytes = static_cast<off_t>(std::min(offsets.bodies, offsets.total));
      // Reserved space turns a full file system into an error here instead of a SIGBUS later.
      int error;
      do {
        error = ::posix_fallocate(fd.get(), 0, bytes);
      } while (error == EINTR);
      if (error == 0) break;
      if (::ftruncate(fd.get(), 0) != 0) fail("ftruncate of " + path);
      if (error != ENOSPC || tuning.purpose == Purpose::posting || tuning.slot_bytes / 2 < smallest_slot(size)) {
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
    segment.format(seating, tuning, nonce);
    segment.header().reserved = 1;
    return segment;
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
}

Segment Segment::open(const std::string& path, const Nonce& nonce, int size) {
  const bool is_memfd = has_shape(path, "/proc/", kDigits, "/fd/", kDigits);
  if (!is_memfd && !has_shape(path, "/dev/shm/phalanx-", kHexDigits)) refuse(path, "is not where segments are");
  const int follow = is_memfd ? 0 : O_NOFOLLOW;
  // A look at what is there, which opens nothing: it may be a device or a FIFO.
  Fd looked(::open(path.c_str(), O_PATH | O_CLOEXEC | follow));
  if (looked.get() < 0) fail("open of " + path);
  const struct stat seen = stat_of(looked.get(), path);
  check_owner(seen, path);
  Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | follow));
  if (fd.get() < 0) fail("open of " + path);
  const struct stat status = stat_of(fd.get(), path);
  if (status.st_dev != seen.st_dev || status.st_ino != seen.st_ino) refuse(path, "was replaced while it was opened");
  check_owner(status, path);
  // Read before mapping: the number in /proc may by chance be any other file of another process.
  Header header;
  if (::pread(fd.get(), static_cast<void*>(&header), sizeof(Header), 0) != static_cast<ssize_t>(sizeof(Header)) ||
      header.magic != kMagic || std::memcmp(header.nonce, nonce.data(), nonce.size()) != 0) {
    refuse(path, "is not the segment of this group");
  }
  if (header.version != kVersion) {
    throw std::runtime_error("the segment has layout version " + std::to_string(header.version) +
                             ", this library has " + std::to_string(kVersion));
  }
  if (header.size != static_cast<std::uint32_t>(size) || !makes_sense(header.tuning)) {
    refuse(path, "has a header that does not fit this group");
  }
  const Offsets offsets(size, header.tuning);
  if (header.total_bytes != offsets.total || static_cast<std::size_t>(status.st_size) != offsets.total) {
    refuse(path, "has the wrong size for a segment");
  }
  // A file that shrinks or has no space behind it turns an access into a SIGBUS.
  if (is_memfd) {
    const int seals = ::fcntl(fd.get(), F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) refuse(path, "could be truncated: it is not sealed");
  } else if (static_cast<std::size_t>(status.st_blocks) * 512 < std::min(offsets.bodies, offsets.total)) {
    refuse(path, "has no space reserved");
  }
  if ((header.reserved == 0) != is_memfd) refuse(path, "has a header that does not fit its kind");
  std::vector<std::int32_t> ranks(static_cast<std::size_t>(size));
  const auto table_bytes = static_cast<ssize_t>(ranks.size() * sizeof(std::int32_t));
  const ssize_t num_read =
      ::pread(fd.get(), ranks.data(), static_cast<std::size_t>(table_bytes), static_cast<off_t>(offsets.ranks));
  const std::optional<Seating> seating = num_read == table_bytes ? Seating::of(ranks) : std::nullopt;
  if (!seating) refuse(path, "has no seat for every rank of this group");
  Segment segment = map(fd.get(), offsets.total);
  fd.release();
  segment.size_ = size;
  segment.offsets_ = offsets;
  segment.seating_ = *seating;
  if (is_memfd) segment.close_fd();
  return segment;
}

Segment Segment::create_private(const Seating& seating, const Tuning& tuning) {
  const std::size_t bytes = Offsets(seating.size(), tuning).total;
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) fail("mmap");
  Segment segment(base, bytes, -1);
  segment.format(seating, tuning, Nonce{});
  return segment;
}

}  // namespace phalanx
