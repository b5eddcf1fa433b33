#include "black_box.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "segment.hpp"

namespace phalanx {

namespace {

constexpr std::size_t kCacheLine = 64;
constexpr std::uint32_t kArenaBytes = 256 * 1024;
// Groups are few and every record needs its own; places in the program may be many.
constexpr std::uint32_t kArenaForLocations = kArenaBytes / 4 * 3;

std::uint32_t saturated(double value) {
  return value >= 4294967295.0 ? 0xffffffffU : value > 0 ? static_cast<std::uint32_t>(value) : 0;
}

template <class TimePoint>
std::int64_t nanoseconds(TimePoint time) noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

// What makes a time of day of this process' clock. Of some looks at both clocks the quickest counts: the process may be
// held up between the two, and reports compare the times of several processes.
std::int64_t clock_offset() noexcept {
  constexpr int kLooks = 8;
  std::int64_t offset = 0;
  auto quickest = Clock::duration::max();
  for (int look = 0; look < kLooks; ++look) {
    const auto before = Clock::now();
    const std::int64_t day = nanoseconds(std::chrono::system_clock::now());
    const auto took = Clock::now() - before;
    if (took < quickest) {
      quickest = took;
      offset = day - nanoseconds(before + took / 2);
    }
  }
  return offset;
}

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// Space is reserved: a full disk is an error here and not a SIGBUS later.
void* map_file(int fd, std::size_t bytes) {
  int error;
  do {
    error = ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  void* base = error == 0 ? ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  if (error == 0 && base == MAP_FAILED) error = errno;
  if (error == 0) return base;
  fail(error, "reserving " + std::to_string(bytes) + " bytes for the black box");
}

void* map_memory(std::size_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) fail(errno, "mmap");
  return base;
}

}  // namespace

void BoxEntry::number(std::uint64_t seq) const noexcept {
  if (!claim()) return;
  record_->seq.store(seq, std::memory_order_relaxed);
  release();
}

void BoxEntry::start(Clock::time_point time) const noexcept {
  if (!claim()) return;
  record_->started.store(nanoseconds(time), std::memory_order_relaxed);
  record_->state.store(CallState::started, std::memory_order_release);
  release();
}

void BoxEntry::came_from(int sender) const noexcept {
  if (!claim()) return;
  record_->sender = sender;
  release();
}

void BoxEntry::blame(const Failure& failure) const noexcept {
  if (!claim()) return;
  const bool is_gone = failure.kind == FailureKind::left || failure.kind == FailureKind::lost;
  record_->failure = static_cast<std::uint8_t>(failure.kind);
  record_->blamed = is_gone ? failure.peer : failure.kind == FailureKind::aborted ? failure.rank : kNoRank;
  release();
}

void BoxEntry::end(bool well, Clock::time_point time, int last_arriver) const noexcept {
  if (!claim()) {
    // The call that took the place counted this one.
    if (header_ != nullptr) header_->num_hidden.fetch_sub(1, std::memory_order_relaxed);
    return;
  }
  record_->last_arriver = last_arriver;
  record_->ended.store(nanoseconds(time), std::memory_order_relaxed);
  record_->state.store(well ? CallState::completed : CallState::failed, std::memory_order_release);
  release();
}

BlackBox::BlackBox(int fd, std::uint32_t capacity, int rank, int world_size, const std::string& program)
    : bytes_(kPage + kArenaBytes + capacity * sizeof(BoxRecord)), generation_(fork_generation()) {
  base_ = fd < 0 ? map_memory(bytes_) : map_file(fd, bytes_);
  ::madvise(base_, bytes_, MADV_DONTFORK);
  auto* made = new (base_) BoxHeader{};
  const Identity self = own_identity();
  made->version = kBoxVersion;
  made->capacity = capacity;
  made->arena_bytes = kArenaBytes;
  made->record_bytes = sizeof(BoxRecord);
  made->pid = self.pid;
  made->start = self.start;
  made->clock_offset = clock_offset();
  made->rank.store(rank, std::memory_order_relaxed);
  made->world_size.store(world_size, std::memory_order_relaxed);
  made->arena_used.store(1, std::memory_order_relaxed);
  copy_text(made->program, program);
  // Cut where it is longer.
  if (::gethostname(made->host, sizeof(made->host) - 1) != 0) made->host[0] = 0;
  next_ = records();
  end_ = next_ + capacity;
  // Last: a file with this word is whole.
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(made->magic, kBoxMagic, sizeof(made->magic));
}

BlackBox::~BlackBox() {
  // A forked child does not have the mapping; something else may be at its address by now.
  if (!forked()) ::munmap(base_, bytes_);
}

bool BlackBox::forked() const noexcept { return generation_ != fork_generation(); }

BoxRecord* BlackBox::records() const noexcept {
  return reinterpret_cast<BoxRecord*>(static_cast<char*>(base_) + kPage + kArenaBytes);
}

std::uint32_t BlackBox::append(const void* data, std::size_t size, std::size_t alignment, std::size_t room) noexcept {
  const std::size_t offset = round_up(header().arena_used.load(std::memory_order_relaxed), alignment);
  if (offset + size > room) return 0;
  std::memcpy(arena() + offset, data, size);
  header().arena_used.store(static_cast<std::uint32_t>(offset + size), std::memory_order_release);
  return static_cast<std::uint32_t>(offset);
}

std::uint32_t BlackBox::remember(const std::string& text, std::size_t room) {
  if (forked() || text.empty()) return 0;
  const std::lock_guard lock(mutex_);
  const auto known = texts_.find(text);
  if (known != texts_.end()) return known->second;
  const std::uint32_t offset = append(text.c_str(), text.size() + 1, 1, room);
  if (offset != 0) texts_.emplace(text, offset);
  return offset;
}

std::uint32_t BlackBox::remember(const std::string& text) { return remember(text, kArenaBytes); }

std::uint32_t BlackBox::remember_group(const GroupTexts& texts) {
  const auto offset_of_text = [&](const std::string& text) { return remember(text); };
  const std::array<std::uint32_t, 6> key{offset_of_text(texts.name),     offset_of_text(texts.description),
                                         offset_of_text(texts.identity), offset_of_text(texts.venue),
                                         offset_of_text(texts.ranks),    static_cast<std::uint32_t>(texts.rank)};
  // A group is known whole, or not at all.
  const std::array<const std::string*, 5> all{&texts.name, &texts.description, &texts.identity, &texts.venue,
                                              &texts.ranks};
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (key[i] == 0 && !all[i]->empty()) return 0;
  }
  if (forked()) return 0;
  const std::lock_guard lock(mutex_);
  const auto known = groups_.find(key);
  if (known != groups_.end()) return known->second;
  const BoxGroup group{key[0], key[1], key[2], key[3], key[4], texts.rank, {}};
  const std::uint32_t offset = append(&group, sizeof(group), alignof(BoxGroup), kArenaBytes);
  if (offset != 0) groups_.emplace(key, offset);
  return offset;
}

std::uint32_t BlackBox::offset_of(const Location& location) {
  if (location.id >= locations_.size()) locations_.resize(location.id + 64, 0);
  std::uint32_t& offset = locations_[location.id];
  if (offset == 0) offset = remember(location.parts, kArenaForLocations);
  return offset;
}

std::pair<BoxRecord*, std::uint64_t> BlackBox::take_place() noexcept {
  std::uint64_t id = header().next.load(std::memory_order_relaxed);
  for (;;) {
    // The ids of places that are left out are left out as well. No division: it takes longer than all the rest.
    ++id;
    BoxRecord* place = next_;
    if (++next_ == end_) next_ = records();
    std::uint64_t found = place->id.load(std::memory_order_relaxed);
    if ((found & kMarking) == 0 &&
        place->id.compare_exchange_strong(found, 0, std::memory_order_acquire, std::memory_order_relaxed)) {
      header().next.store(id, std::memory_order_relaxed);
      return {place, id};
    }
  }
}

BoxEntry BlackBox::begin(const BoxCall& call) {
  const auto [place, id] = take_place();
  BoxRecord& made = *place;
  // A call that is still in flight has no record from now on.
  const CallState state = made.state.load(std::memory_order_relaxed);
  if (state == CallState::scheduled || state == CallState::started) {
    header().num_hidden.fetch_add(1, std::memory_order_relaxed);
  }
  // Readers see the id 0 before any of what follows.
  std::atomic_thread_fence(std::memory_order_release);
  made.state.store(CallState::scheduled, std::memory_order_relaxed);
  made.kind = call.kind;
  made.failure = 0;
  made.group = call.group;
  made.seq.store(call.seq, std::memory_order_relaxed);
  made.created = nanoseconds(call.created);
  made.started.store(0, std::memory_order_relaxed);
  made.ended.store(0, std::memory_order_relaxed);
  made.sender = made.last_arriver = made.blamed = kNoRank;
  made.location = call.location;
  made.bytes_in = call.bytes_in;
  made.bytes_out = call.bytes_out;
  made.timeout_ms = saturated(call.timeout * 1000);
  made.call = call.call;
  made.id.store(id, std::memory_order_release);
  // The ring is too long to stay in the nearest cache: the next call finds its place there.
  const auto* next = reinterpret_cast<const char*>(next_);
  for (std::size_t at = 0; at < sizeof(BoxRecord); at += kCacheLine) __builtin_prefetch(next + at, 1);
  return {&made, id, &header()};
}

void BlackBox::set_rank(int rank, int world_size) noexcept {
  if (forked()) return;
  header().rank.store(rank, std::memory_order_relaxed);
  header().world_size.store(world_size, std::memory_order_relaxed);
}

void BlackBox::say_end(Ending how, const std::string& exception, Clock::time_point time) noexcept {
  if (forked() || header().ended.load(std::memory_order_relaxed) != 0) return;
  copy_text(header().exception, exception);
  header().how.store(how, std::memory_order_relaxed);
  header().ended.store(nanoseconds(time), std::memory_order_release);
}

void BlackBox::set_exit_status(std::int32_t status) noexcept {
  if (!forked()) header().exit_status.store(1 + status, std::memory_order_release);
}

void BlackBox::say_death(int rank, const Identity& identity, std::int32_t status, bool replaced) noexcept {
  if (forked()) return;
  const std::uint32_t number = header().num_deaths.load(std::memory_order_relaxed);
  if (number == kMostDeaths) return;
  // A death in one group is seen again while the next one is made.
  for (std::uint32_t i = 0; i < number; ++i) {
    if (header().deaths[i].pid == identity.pid && header().deaths[i].start == identity.start) return;
  }
  BoxDeath& death = header().deaths[number];
  death.pid = identity.pid;
  death.start = identity.start;
  death.status = status;
  death.replaced = replaced ? 1 : 0;
  death.rank = static_cast<std::uint16_t>(rank + 1);
  death.seen.store(nanoseconds(Clock::now()), std::memory_order_release);
  header().num_deaths.store(number + 1, std::memory_order_release);
}

void BlackBox::move_to(int fd) {
  if (forked()) return;
  void* base = map_file(fd, bytes_);
  ::madvise(base, bytes_, MADV_DONTFORK);
  std::memcpy(base, base_, bytes_);
  // At the same address: calls that end late, and the thread that notes deaths, may write there at any time.
  if (::mremap(base, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, base_) == MAP_FAILED) {
    const int error = errno;
    ::munmap(base, bytes_);
    fail(error, "moving the black box to another file");
  }
}

std::string BlackBox::contents() const {
  return forked() ? std::string() : std::string(static_cast<const char*>(base_), bytes_);
}

}  // namespace phalanx
