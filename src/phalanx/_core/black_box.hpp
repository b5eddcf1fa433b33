// The last calls of this process, in a mapped file that outlives it.
//
//   Header (a page) | arena (texts, each ended by a zero byte) | Record[capacity]
//
// A record is written by the thread that makes the call, and marked by the threads that go on with the call, one at a
// time. Nobody waits, and nobody calls the system. A call that ends late may have lost its place to a newer one: so a
// marker first adds kMarking to the record's id, which fails if the id is another call's, and a new call leaves out a
// place that is being marked. Other processes may read the file at any time: a record whose id, without kMarking, is
// the same before and after reading it was read whole. A record's texts are offsets into the arena, which only grows; 0
// is a text that found no room. Parts of a text are divided by kDivider:
//
//   of a place in the program   file, line, function
//   of a group                  name, description, this rank in it, its ranks in the world ("0-2,5"), its identity
//
// The header also says how the process ended, as far as it knew, and which peers it has seen die.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "futex.hpp"
#include "layout.hpp"
#include "location.hpp"
#include "peers.hpp"

namespace phalanx {

enum class CallState : std::uint32_t { scheduled = 1, started = 2, completed = 3, failed = 4 };

inline constexpr char kDivider = '\x1f';

// Peers that a box remembers to have died: what comes later is not the cause.
inline constexpr std::uint32_t kMostDeaths = 16;

// What a process knows of its own end.
enum class Ending : std::uint32_t {
  unknown = 0,
  exit = 1,         // it left its groups in order
  exception = 2,    // nobody caught it
  consequence = 3,  // the same, of an exception that came of a group's failure
};

// A peer that was seen to have died.
struct BoxDeath {
  std::atomic<std::int64_t> seen;  // when; 0: no death yet. Written last
  std::int64_t pid;
  std::uint64_t start;
  std::int32_t status;     // as waitpid gives it; kUnknownStatus
  std::uint16_t replaced;  // 1: the process lives on, and has called exec
  std::uint16_t rank;      // 1 + its rank in the job; 0: unknown
};

struct BoxHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t capacity;
  std::uint32_t arena_bytes;
  std::uint32_t record_bytes;
  std::int64_t pid;
  std::uint64_t start;
  std::int64_t clock_offset;  // what makes a time of day of a record's times, in nanoseconds
  std::atomic<std::int32_t> rank;
  std::atomic<std::int32_t> world_size;
  std::atomic<std::uint64_t> next;  // records begun so far
  std::atomic<std::uint32_t> arena_used;
  std::atomic<std::uint32_t> ending;  // 0 running, 1 ended well, 2 failed; written by debug/folders.py
  char program[256];
  std::atomic<std::int64_t> ended;        // when the process began to end; 0: it has not
  std::atomic<std::uint32_t> how;         // Ending
  std::atomic<std::int32_t> exit_status;  // 1 + what waitpid will give; 0: unknown
  std::atomic<std::int64_t> num_hidden;   // calls in flight whose records were overwritten
  std::atomic<std::uint32_t> num_deaths;  // of those below
  std::uint32_t reserved;
  BoxDeath deaths[kMostDeaths];
  char exception[1024];
};

struct alignas(kLine) BoxRecord {
  std::atomic<std::uint64_t> id;  // from 1; 0 while the record is being written; with kMarking while it is marked
  std::atomic<std::uint32_t> state;
  std::uint32_t group;
  std::atomic<std::uint64_t> seq;
  std::int64_t count;
  std::uint64_t bytes_in;
  std::uint64_t bytes_out;
  std::int64_t created;
  std::atomic<std::int64_t> started;
  std::atomic<std::int64_t> ended;
  std::uint32_t location;
  std::uint32_t tag;
  std::int32_t peer;
  std::uint8_t op;
  std::int8_t reduce_op;
  std::uint8_t dtype;
  std::uint8_t flags;  // CallFlags, and kListed
  std::uint8_t num_sizes;
  std::uint8_t failure;  // FailureKind of the group, where the call has failed
  std::uint16_t blamed;  // 1 + the rank of the group that left, died or aborted; 0: none
  std::uint32_t timeout_ms;
  std::uint32_t sizes[kSizesKept];
};
inline constexpr std::uint8_t kListed = 8;
// In place of an op: the making of the group. Its seq is the number of the meeting, its group's identity is the place
// where the ranks meet.
inline constexpr std::uint8_t kMaking = 255;
inline constexpr std::uint64_t kMarking = std::uint64_t{1} << 63;

static_assert(sizeof(BoxHeader) <= kPage);
static_assert(sizeof(BoxRecord) == kLine);

// What a record says of a call when it is made.
struct BoxCall {
  std::uint32_t group = 0;
  Description call;
  std::uint64_t seq = 0;
  std::uint64_t bytes_in = 0;
  std::uint64_t bytes_out = 0;
  double timeout = 0;
  Clock::time_point created{};
  std::uint32_t location = 0;
};

// The record of a call that may still be under way. Does nothing where there is none, or where another has its place.
// One thread at a time.
class BoxEntry {
 public:
  BoxEntry() = default;
  BoxEntry(BoxRecord* record, std::uint64_t id, BoxHeader* header) noexcept
      : record_(record), id_(id), header_(header) {}

  std::uint64_t id() const noexcept { return id_; }
  void number(std::uint64_t seq) const noexcept;
  void start(Clock::time_point time) const noexcept;
  // Why the call is about to fail.
  void blame(const Failure& failure) const noexcept;
  void end(bool well, Clock::time_point time = Clock::now()) const noexcept;

  // Whether the record is still this call's. Then it stays so until `release`, and may be written.
  //
  // All threads that write to a record take it by a compare-exchange of its id: markers from `id` to `id | kMarking`,
  // begin() from an id without kMarking to 0. These are in one order, so that one of two has the record and the other
  // leaves it alone. Acquire here and the release store that gives it back order the writes of one before those of the
  // next.
  bool claim() const noexcept {
    std::uint64_t own = id_;
    return own != 0 && record_ != nullptr &&
           record_->id.compare_exchange_strong(own, id_ | kMarking, std::memory_order_acquire,
                                               std::memory_order_relaxed);
  }
  void release() const noexcept { record_->id.store(id_, std::memory_order_release); }

 private:
  BoxRecord* record_ = nullptr;
  std::uint64_t id_ = 0;
  BoxHeader* header_ = nullptr;
};

class BlackBox {
 public:
  // In an empty file that the caller has opened, and may close afterwards; in memory of this process alone where `fd`
  // is negative. Throws std::system_error.
  BlackBox(int fd, std::uint32_t capacity, int rank, int world_size, const std::string& program);
  ~BlackBox();
  BlackBox(const BlackBox&) = delete;
  BlackBox& operator=(const BlackBox&) = delete;

  // The offset of a text, which is kept once.
  std::uint32_t remember(const std::string& text);
  // One thread at a time: those who come from Python hold the GIL. Not in a forked child.
  std::uint32_t offset_of(const Location& location);
  BoxEntry begin(const BoxCall& call);
  // The entry of a record by its number.
  BoxEntry entry(std::uint64_t id) const noexcept {
    return forked() ? BoxEntry() : BoxEntry(records() + (id - 1) % header().capacity, id, &header());
  }
  // Of the groups that are made from now on.
  void set_rank(int rank, int world_size) noexcept;
  // The process is about to end. What is said first stays.
  void say_end(Ending how, const std::string& exception, Clock::time_point time) noexcept;
  void set_exit_status(std::int32_t status) noexcept;
  // One thread at a time. What was said of a process first stays.
  void say_death(int rank, const Identity& identity, std::int32_t status, bool replaced) noexcept;
  // From now on the box is in this file, which is empty, with all that it had. While no group uses it. Throws
  // std::system_error.
  void move_to(int fd);
  std::string contents() const;
  // True in a child of the process that made it: the memory is not there.
  bool forked() const noexcept;

 private:
  BoxHeader& header() const noexcept { return *static_cast<BoxHeader*>(base_); }
  char* arena() const noexcept { return static_cast<char*>(base_) + kPage; }
  BoxRecord* records() const noexcept;
  // The next record that nobody marks, with id 0, and the id that it is to have.
  std::pair<BoxRecord*, std::uint64_t> take_place() noexcept;

  void* base_ = nullptr;
  std::size_t bytes_ = 0;
  BoxRecord* next_ = nullptr;  // the place of the next record
  BoxRecord* end_ = nullptr;
  std::uint32_t generation_ = 0;
  std::mutex mutex_;  // of what follows
  std::map<std::string, std::uint32_t> texts_;
  std::vector<std::uint32_t> locations_;  // offsets by the location's id; 0: not there yet
};

}  // namespace phalanx
