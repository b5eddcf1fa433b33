// One rank's end of a group whose calls another engine carries out: the ranks find out whether their calls agree, and
// never wait for each other.
//
// Calls and messages are posted by one thread at a time; those who come from Python hold the GIL. A rank that finds a
// difference leaves the report to whoever tends it: the progress thread, which also sleeps until a peer reports a
// failure, or a scheduler that has the clock in its hands.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "member.hpp"
#include "posts.hpp"
#include "progress.hpp"
#include "reporting.hpp"

namespace phalanx {

class Agreement : public Tendable {
 public:
  // `tell` is called once, by whoever tends it, when the group has a failure.
  Agreement(std::shared_ptr<Member> member, std::function<void()> tell);

  // The next collective of this rank; returns its number. Never waits.
  std::uint64_t post(const Description& call, const Location* location) noexcept;
  // The next message of this rank to or from call.peer; returns its number among those.
  std::uint64_t post_message(const Description& call, const Location* location);

  // Goes on with the report of what this rank has found. True: the group has a failure, and it was told.
  bool advance(Clock::time_point now);
  // For a rank that leaves: reports what it has found, unless that takes longer than `until`. Nobody else may know it.
  void report_until(Clock::time_point until);
  // This rank has found a difference.
  bool has_found() const noexcept { return has_found_.load(std::memory_order_acquire); }
  // The group has failed, and `tell` was called.
  bool was_told() const noexcept { return was_told_.load(std::memory_order_acquire); }

  // The last collective that this rank has posted.
  std::uint64_t seq() const noexcept { return calls_.seq(); }
  const Member& member() const noexcept { return *member_; }

  Tended tend(bool urgent, Sleep& sleep) override;
  // Nothing is pending in it but a report.
  bool idle() const noexcept override { return was_told() || !has_found(); }

 private:
  // What was found, and in which sequence: of collectives, or of messages from one rank to another.
  struct Found {
    Difference difference;
    Description call;  // what this rank was about to do
    const Location* location = nullptr;
    LaneKind kind = LaneKind::calls;
  };
  // A side of the messages from one rank to another.
  struct Pair {
    Pair(const Segment& segment, Seat from, Seat to, bool is_sender)
        : posts(segment, from, to, is_sender), posting(is_sender ? 0 : 1, 2) {}
    MessagePosts posts;
    Posting<kPairDepthBits, kPairLevels, 2> posting;
    std::uint64_t chain = 0;
  };

  // What a rank had posted when the difference was found.
  struct Seen {
    std::optional<PostEntry::Content> call;  // the one in question
    std::uint64_t posted = 0;                // the last one
  };

  void keep(const Found& found) noexcept;
  Finding finding();
  void testify(std::uint32_t report, int rank) const;
  // The call in question that a rank has posted.
  std::optional<PostEntry::Content> find_call(int rank) const noexcept;

  const std::shared_ptr<Member> member_;
  const std::function<void()> tell_;
  // Of the thread that posts.
  CallPosts posts_;
  Posting<kPostDepthBits, kPostLevels, kMaxRanks> calls_;
  std::uint64_t chain_ = 0;
  std::map<std::pair<int, bool>, Pair> pairs_;  // by peer and whether this rank sends
  std::uint64_t num_messages_ = 0;
  // Handed by the thread that posts to the one that tends: the first difference.
  Found found_;
  std::vector<Seen> seen_;  // by rank
  std::atomic<bool> has_found_{false};
  // Of the one that tends: the progress thread, and for a moment also a thread that leaves the group.
  std::mutex mutex_;
  Reporting reporting_;
  std::atomic<bool> was_told_{false};
};

}  // namespace phalanx
