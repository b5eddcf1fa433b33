// This rank's end of a group's segment: what it publishes there, and whether the rank is still in.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "black_box.hpp"
#include "refusal_notes.hpp"
#include "reporting.hpp"
#include "statistics.hpp"

namespace phalanx {

class Ticket;
enum class Result : int;

struct Member {
  // Throws where the rank is not one of the group's, or taken.
  Member(std::shared_ptr<Segment> shared, int rank);

  int rank() const noexcept { return lines.rank(); }
  Seat seat() const noexcept { return lines.seat(); }
  int size() const noexcept { return lines.size(); }
  bool has_left() const noexcept { return left.load(std::memory_order_acquire); }

  // What a rank was doing when it found a failure.
  struct Doing {
    const Description& call;
    std::uint64_t seq;
    const Location* location;
    bool asked = false;  // whoever is missing, just before
  };
  // So long before a call gives up the missing ranks are asked where they are: afterwards they will have moved on.
  static constexpr std::chrono::milliseconds kAskBefore{150};
  void ask_missing(Ticket& ticket, const std::vector<int>& missing) const noexcept;
  // What this rank has found. `other_tags` are those of messages that came instead of the one that is missing.
  Failure timeout_of(const Doing& doing, const std::vector<int>& missing,
                     const std::set<std::uint32_t>& other_tags = {}) const;
  Failure end_of(int peer, const Doing& doing) const;
  // Breaks the group, unless it is broken already, and ends all waits in it. Waits for another rank that reports a
  // failure.
  void abort(std::uint64_t seq, const std::string& reason);
  // What the finder of the group's failure saw, by rank.
  std::vector<Testimony> testimonies() const;
  // From now on calls are recorded in this box, as calls of this group there. `path` is where peers find it.
  void keep_records(std::shared_ptr<BlackBox> new_box, std::uint32_t group, const std::string& path);
  // The same on all ranks of the group, and on those of no other group.
  std::string identity() const;
  // Writes down why a call fails, before it ends with this result.
  void blame(const Ticket& ticket, Result result) const;

  const std::shared_ptr<Segment> segment;
  Lines lines;
  RefusalNotes refusals;
  // Outlives the group: it can be read when the group was left.
  const std::shared_ptr<Statistics> statistics = std::make_shared<Statistics>();
  std::atomic<bool> left{false};
  // Where calls are recorded, and the offset of this group there. Set before the first call; later, when the group is
  // renamed, to the same box, into which entries of calls under way point. With the GIL held.
  std::shared_ptr<BlackBox> box;
  std::uint32_t box_group = 0;
  // Where the last call was made, and the text of that in the box. With the GIL held.
  const Location* last_location = nullptr;
  std::uint32_t location_text_in_box = 0;
};

}  // namespace phalanx
