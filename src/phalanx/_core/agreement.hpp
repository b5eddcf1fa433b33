// One rank's end of a group whose calls another engine carries out: the ranks find out whether their calls agree, and
// never wait for each other.
//
// Calls and messages are posted by one thread at a time; those who come from Python hold the GIL. A rank that finds a
// difference leaves the report to the one that tends it: the progress thread, which also compares now and then and
// sleeps until a peer reports a failure, or a scheduler that has the clock in its hands (bind_local_agreement.cpp).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "member.hpp"
#include "posts.hpp"
#include "progress.hpp"
#include "reporting.hpp"

namespace phalanx {

// How an engine finds the send to a receive. Where tags count, messages of different tags may overtake each other.
enum class Matching : bool { by_order, by_tag };

class Agreement : public Tendable {
 public:
  // The thread that tends it compares so often. With the grace of a report, all processes know within 100 ms.
  static constexpr std::chrono::milliseconds kBetweenComparisons{30};

  // `tell` is called once, by the one that tends it, when the group has a failure. `wake` is called by the thread that
  // posts when there is something to report.
  Agreement(std::shared_ptr<Member> member, std::function<void()> tell, std::function<void()> wake,
            Matching matching = Matching::by_order);

  // The next collective of this rank; returns its number. Never waits. `result` is, at Check::full, a hash of what the
  // call before gave.
  // `balance` is that of a DividedCall.
  std::uint64_t post(const Description& call, const Location* location, std::uint64_t result = 0,
                     std::uint64_t balance = 0) noexcept;
  // The next message of this rank to or from call.peer; returns its number among those.
  std::uint64_t post_message(const Description& call, const Location* location);
  // This rank receives from anybody: from now on nobody knows which send belongs to which of its receives, and they are
  // not compared.
  void expect_any_sender() noexcept { expects_any_sender_ = true; }
  // For reports: this rank's collectives up to this one have ended well.
  void set_completed(std::uint64_t seq) noexcept;

  // Compares with each peer, as far as both have posted, also where others are absent. True: this rank has found a
  // difference, now or before. May run while another thread posts.
  bool compare();
  // Compares with one peer, as far as both have posted: enough where all that have posted are known to agree.
  bool compare_with(int peer);
  // Goes on with the report of what this rank has found. True: the group has a failure, and it was told.
  bool advance(Clock::time_point now);
  // The same, but the report does not wait for ranks that have not posted the call.
  bool report_now(Clock::time_point now);
  // Another failure, found by the one that tends it. A difference that was found before comes first.
  void fail(const Failure& failure, Clock::time_point now);
  // For a rank that leaves: reports what it has found, unless that takes longer than `until`. Nobody else may know it.
  void report_until(Clock::time_point until);
  // This rank has found a difference.
  bool has_found() const noexcept { return has_found_.load(std::memory_order_acquire); }
  // The group has failed, and `tell` was called.
  bool was_told() const noexcept { return was_told_.load(std::memory_order_acquire); }

  // The last collective that this rank has posted.
  std::uint64_t seq() const noexcept { return calls_.seq(); }
  // Where in the program this rank has made a call; empty where that is not known any more.
  std::string place_of(const Description& call, std::uint64_t seq) const;
  // How many messages a peer has posted to this rank (`sends`: it is the sender), or from it.
  std::uint64_t messages_posted(int peer, bool sends) const noexcept;
  // The last collective that a rank has posted.
  std::uint64_t posted(int rank) const noexcept { return posts_.posted(rank); }
  const Member& member() const noexcept { return *member_; }

  Tended tend(bool urgent, Sleep& sleep) override;
  // Nothing is pending in it but a report.
  bool idle() const noexcept override { return was_told() || !has_found(); }

 private:
  // What was found, and in which sequence: of collectives, or of messages from one rank to another.
  struct Found {
    Difference difference;
    LaneKind kind = LaneKind::calls;
    bool sends = false;  // of messages: this rank is the sender
    bool sizes_differ = false;
  };
  // A side of the messages from one rank to another.
  struct Pair {
    Pair(const Segment& segment, Seat from, Seat to, bool is_sender)
        : posts(segment, from, to, is_sender), posting(is_sender ? 0 : 1, 2), comparing(is_sender ? 0 : 1, 2) {}
    MessagePosts posts;
    MessagePosts::Poster posting;
    std::uint64_t chain = 0;
    // Where messages match by tag: sums over all messages, in which their order does not count, and how many there were
    // of each tag.
    std::uint64_t which = 0, what = 0;
    std::map<std::uint32_t, std::uint64_t> num_of_tag;
    MessagePosts::Comparer comparing;  // of the one that compares at rest
  };

  // What a rank had posted when the difference was found.
  struct Seen {
    std::optional<PostEntry::Content> call;       // the one in question
    std::optional<PostEntry::Content> completed;  // the last one before it that had ended well
    std::uint64_t posted = 0;                     // the number of the last one
  };

  static constexpr std::size_t pair_index(int peer, bool sends) noexcept {
    return static_cast<std::size_t>(peer) * 2 + (sends ? 1 : 0);
  }
  Pair& pair_of(int peer, bool sends);
  std::uint64_t word_of(Pair& messages, const Description& call) const;
  void note_shapes(const OtherShape& other) noexcept;
  bool sizes_fit(std::uint64_t seq) const noexcept;
  // The first of the two threads that find a difference keeps it.
  void keep(const Found& found) noexcept;
  void see_all();
  void see(int rank) noexcept;
  bool compare_locked();
  bool keep_compared(bool agrees);
  bool advance_locked(Clock::time_point now);
  bool is_complete() const noexcept;
  std::uint64_t agreed_at_rest() const noexcept;
  Finding finding();
  void testify(std::uint32_t report);
  MadeCall made_call(int rank, const std::optional<PostEntry::Content>& call) const;
  // The call in question that a rank has posted.
  std::optional<PostEntry::Content> find_call(int rank) const noexcept;
  std::optional<PostEntry::Content> find_collective(int rank, std::uint64_t seq) const noexcept;
  template <class IsIt>
  std::optional<PostEntry::Content> find_message(int rank, Op op, int peer, IsIt&& is_it) const noexcept;
  // The number of another message of a rank that fits `message`, of its peer; 0: there is none, or not any more.
  std::uint64_t find_fitting(int rank, Op op, int peer, const PostEntry::Content& message) const noexcept;

  const std::shared_ptr<Member> member_;
  const std::function<void()> tell_;
  const std::function<void()> wake_;
  const Matching matching_;
  // Of the thread that posts.
  CallPosts posts_;
  CallPosts::Poster calls_;
  std::uint64_t chain_ = 0;
  std::uint64_t num_messages_ = 0;
  bool expects_any_sender_ = false;
  std::vector<std::unique_ptr<Pair>> made_pairs_;
  // By peer and whether this rank sends. Made by the thread that posts, for both.
  std::vector<std::atomic<Pair*>> pairs_;
  // The first difference, handed to the one that tends.
  std::atomic<bool> is_kept_{false};
  Found found_;
  std::vector<Seen> seen_;  // by rank, once there is one
  std::atomic<bool> has_found_{false};
  // Of the one that tends: the progress thread, and for a moment also a thread that leaves the group.
  std::mutex mutex_;
  CallPosts::Comparer comparing_;
  Reporting reporting_;
  std::atomic<bool> was_told_{false};
};

}  // namespace phalanx
