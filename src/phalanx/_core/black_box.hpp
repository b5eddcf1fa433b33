// The last calls of this process, in a mapped file that outlives it. box_format.hpp says what is in the file.
//
// A record is written by the thread that makes the call, and marked by the threads that go on with the call, one at a
// time. Nobody waits, and nobody calls the system. A call that ends late may have lost its place to a newer one: so a
// marker first adds kMarking to the record's id, which fails if the id is another call's, and a new call leaves out a
// place that is being marked. Other processes may read the file at any time: a record whose id, without kMarking, is
// the same before and after reading it was read whole.
//
// The header also says how the process ended, as far as it knew, and which peers it has seen die.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "box_format.hpp"
#include "futex.hpp"
#include "layout.hpp"
#include "location.hpp"
#include "peers.hpp"

namespace phalanx {

// What a record says of a call when it is made.
struct BoxCall {
  RecordKind kind = RecordKind::call;
  std::uint32_t group = 0;  // the offset of its BoxGroup
  Description call;
  std::uint64_t seq = 0;
  std::uint64_t bytes_in = 0;
  std::uint64_t bytes_out = 0;
  double timeout = 0;
  Clock::time_point created{};
  std::uint32_t location = 0;
};

// A BoxGroup with its texts.
struct GroupTexts {
  std::string name;
  std::string description;
  std::string identity;
  std::string venue;
  std::string ranks;
  std::int32_t rank = kNoRank;
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
  // Who sent what a receive from any rank gets.
  void came_from(int sender) const noexcept;
  // Why the call is about to fail.
  void blame(const Failure& failure) const noexcept;
  void end(bool well, Clock::time_point time = Clock::now(), int last_arriver = kNoRank) const noexcept;

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

  // The offset of a text, or of a group, which is kept once; 0: there is no room, or the text is empty.
  std::uint32_t remember(const std::string& text);
  std::uint32_t remember_group(const GroupTexts& texts);
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
  // The offset of these bytes in the arena, of which they may take up `room`; 0: there is none left.
  std::uint32_t append(const void* data, std::size_t size, std::size_t alignment, std::size_t room) noexcept;
  std::uint32_t remember(const std::string& text, std::size_t room);
  // The next record that nobody marks, with id 0, and the id that it is to have.
  std::pair<BoxRecord*, std::uint64_t> take_place() noexcept;

  void* base_ = nullptr;
  std::size_t bytes_ = 0;
  BoxRecord* next_ = nullptr;  // the place of the next record
  BoxRecord* end_ = nullptr;
  std::uint32_t generation_ = 0;
  std::mutex mutex_;  // of what follows
  std::map<std::string, std::uint32_t> texts_;
  std::map<std::array<std::uint32_t, 6>, std::uint32_t> groups_;  // by their fields
  std::vector<std::uint32_t> locations_;                          // offsets by the location's id; 0: not there yet
};

}  // namespace phalanx
