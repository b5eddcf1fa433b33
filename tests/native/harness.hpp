// What the parts of the native stress test share: ranks as threads over one mapping, in seats of other numbers; calls
// as calling.cpp makes them, but with a choice of who goes on with them; random numbers that every rank draws alike,
// and the tally.
//
// Ranks of a world share nothing but its segment while they run: a lock or a counter of the test's own between their
// calls would order what the core must order, and hide a race from the thread sanitizer. The progress thread, which
// ranks in processes of their own would not share, does order some; where callers wait for their calls it has no part.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "group_end.hpp"

namespace stress {

using namespace phalanx;

// Longer than any call takes that is to succeed, on a slow and busy machine too.
inline constexpr std::chrono::seconds kPatience{40};
// As in calling.hpp.
inline constexpr std::chrono::milliseconds kBetweenLooks{50};
inline constexpr int kWorldSizes[] = {1, 2, 3, 4, 8};
inline constexpr int kMostRanks = 8;

constexpr std::uint64_t mix(std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t x = (a + 0x9e3779b97f4a7c15) ^ (b * 0xd1342543de82ef95);
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93;
  return x ^ (x >> 32);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}
  std::uint64_t next() noexcept { return state_ = mix(state_, 1); }
  std::uint64_t below(std::uint64_t limit) noexcept { return next() % limit; }
  bool one_in(std::uint64_t n) noexcept { return below(n) == 0; }
  template <class T, std::size_t kNum>
  T pick(const T (&list)[kNum]) noexcept {
    return list[below(kNum)];
  }

 private:
  std::uint64_t state_;
};

[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...);

// Slots, chunks and one-shot limits small enough that short calls take all paths; waiters that spin,
// lend their CPU or sleep at once. Calls are compared, but not their results: those lie in pieces of any size.
Tuning random_tuning(Random& random);

// Where a rank's calls and messages come from.
const Location& place_of(int rank);

// What went wrong; empty where nothing did.
using Complaints = std::vector<std::string>;

// No rank has the seat of its own number, and seat_of() is not rank_at(), as far as the size allows.
Seating permuted(int size);
std::shared_ptr<Segment> make_segment(int size, const Tuning& tuning);

// A segment and a group for each rank.
struct World {
  World(int size, const Tuning& tuning);
  GroupEnd& operator[](int rank) { return *groups[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(groups.size()); }
  // What the report of the group's failure says of a rank.
  const Testimony& testimony(int rank) {
    return segment->testimony(groups.front()->member().lines.report(), segment->seat_of(rank));
  }

  std::shared_ptr<Segment> segment;
  std::vector<std::unique_ptr<GroupEnd>> groups;
};

// Runs fn(rank, complaints) on a thread for each of the ranks and joins them all.
Complaints on_ranks(const std::vector<int>& ranks, const std::function<void(int, Complaints&)>& fn);
std::vector<int> all_ranks(int size);

// Looks at what is pending in a rank's lanes, again and again, from a thread of its own: as who looks for deadlocks.
class Looker {
 public:
  explicit Looker(GroupEnd& group);
  ~Looker();
  Looker(const Looker&) = delete;
  Looker& operator=(const Looker&) = delete;

 private:
  std::atomic<bool> stops_{false};
  std::thread thread_;
};

const char* name_of(Result result);

// Why a call can't even be handed over; `finished` where it can.
inline Result refusal(const GroupEnd& group) {
  if (group.has_left()) return Result::left;
  return group.broken() ? Result::was_broken : Result::finished;
}

// Calls and messages as calling.cpp makes them. A ticket that is refused has ended when it comes back.
template <class Fill>
std::shared_ptr<CallTicket> start_call(GroupEnd& group, std::chrono::nanoseconds timeout, Handing handing,
                                       Fill&& fill) {
  auto ticket = std::make_shared<CallTicket>();
  fill(ticket->request);
  ticket->request.location = &place_of(group.rank());
  const Result refused = refusal(group);
  if (refused == Result::was_broken) group.calls().give_up_if_idle();
  ticket->made = Clock::now();
  ticket->deadline = ticket->made + timeout;
  refused == Result::finished ? group.calls().submit(ticket, handing) : ticket->end(refused);
  return ticket;
}

struct Message {
  bool sends;
  int peer;
  std::uint32_t tag;
  DType dtype;
  std::int64_t count;
  Piece data;
};
std::shared_ptr<MessageTicket> start_message(GroupEnd& group, std::chrono::nanoseconds timeout, const Message& message);

// Waits until the ticket has ended. Python's signal handlers would have their turn for the first time when `first_look`
// has passed. A call whose time is up before it has begun is taken back.
Result wait_for(Lane& lane, const Ticket& ticket, std::chrono::nanoseconds first_look = kBetweenLooks);
// Looks at the ticket and no more: it is up to the progress thread. CallHandle where that does not end it.
Result poll(const Ticket& ticket);

// One call from its start to its end.
template <class Fill>
Result run_call(GroupEnd& group, std::chrono::nanoseconds timeout, std::chrono::nanoseconds first_look, Fill&& fill) {
  return wait_for(group.calls(), *start_call(group, timeout, Handing::waited_for, fill), first_look);
}

// The ends of calls as the completions tell them, taken by a thread of their own. One at a time: a process has one
// queue.
class Notices {
 public:
  explicit Notices(std::size_t num);  // for tickets 0 to num - 1
  ~Notices();
  Notices(const Notices&) = delete;
  Notices& operator=(const Notices&) = delete;

  // False: the ticket has ended already, and there is no notice to wait for.
  bool expect(Ticket& ticket, std::size_t number);
  void wait(std::size_t number) const;
  // Once all that were expected have been waited for: whether a notice came that nobody expected, or one twice.
  bool in_order() const { return in_order_.load(); }

 private:
  void run();

  std::vector<std::atomic<std::uint32_t>> came_;
  std::atomic<bool> in_order_{true};
  std::thread thread_;
};

inline void yield_times(std::uint64_t times) {
  for (; times > 0; --times) std::this_thread::yield();
}

// Where ranks must have got somewhere before something happens they say so by a relaxed counter, which orders nothing.
inline void wait_until(const std::atomic<int>& count, int value) {
  while (count.load(std::memory_order_relaxed) < value) std::this_thread::yield();
}

// Runs cases one after another, counts them, and prints those that fail.
class Tally {
 public:
  // Only cases whose name has `part` in it.
  explicit Tally(std::string part) : part_(std::move(part)) {}
  void run(const std::string& name, const std::function<Complaints()>& body);
  // The cases of a world: the first of them gets number 1, and each a seed that comes of the world's and its number.
  void run_seeded(const std::string& name, int size, std::uint64_t seed, std::uint64_t number,
                  const std::function<Complaints(Random&)>& body);
  std::string running() const;  // from any thread
  int num_passed() const { return passed_; }
  int num_failed() const { return failed_; }

 private:
  mutable std::mutex mutex_;
  const std::string part_;
  std::string running_;
  int passed_ = 0;
  int failed_ = 0;
};

// Random calls on every rank, each result compared with a plain computation (random_calls.cpp).
// Reductions of many ticks get a mixture of their own: theirs are the slots that are written twice and read twice.
enum class Mixture { all_ops, long_reductions };
Complaints check_random_calls(int size, std::uint64_t seed, Mixture mixture);
// The cases of one world size, each with a seed of its own.
void run_async_cases(Tally& tally, int size, std::uint64_t seed);            // async_calls.cpp
void run_message_cases(Tally& tally, int size, std::uint64_t seed);          // random_messages.cpp
void run_failure_cases(Tally& tally, int size, std::uint64_t seed);          // failures.cpp
void run_pending_failure_cases(Tally& tally, int size, std::uint64_t seed);  // pending_failures.cpp
void run_refusal_cases(Tally& tally, int size, std::uint64_t seed);          // refusals.cpp
void run_seat_cases(Tally& tally, int size, std::uint64_t seed);             // seats.cpp
void run_calling_cases(Tally& tally, std::uint64_t seed);                    // calling.cpp
void run_statistics_cases(Tally& tally, int size, std::uint64_t seed);       // statistics.cpp
void run_handing_over_cases(Tally& tally, std::uint64_t seed);               // handing_over.cpp
void run_reporting_cases(Tally& tally, std::uint64_t seed);                  // reporting.cpp
void run_agreement_cases(Tally& tally, std::uint64_t seed);                  // agreements.cpp
void run_black_box_cases(Tally& tally, std::uint64_t seed);                  // black_box.cpp

// What failure cases say of what they found.
void expect(Complaints& complaints, bool holds, const char* what);
void expect_result(Complaints& complaints, Result found, std::initializer_list<Result> allowed, const char* what);
void expect_failure(Complaints& complaints, const Failure& failure, FailureKind kind, std::uint64_t seq);
// The call of a rank that did not agree with another one's. A rank may come when the report has been made: then it
// finds the group broken, and the report says nothing of its call.
void expect_failed_or_late(Complaints& complaints, World& world, int rank, std::uint64_t seq, Result found);
// The ranks that were waited for when a timeout ran out.
std::vector<int> missing_in(const Failure& failure);
std::vector<int> all_but(int size, const std::vector<int>& absent);
inline int random_rank(Random& random, int size) {
  return static_cast<int>(random.below(static_cast<std::uint64_t>(size)));
}

}  // namespace stress
