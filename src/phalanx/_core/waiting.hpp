// How ranks tell each other that they have got somewhere, and how they wait for it.
//
// A rank publishes by a sequentially consistent store to a counter of its own and then looks whether anyone sleeps.
// A waiter spins on the counters; before it sleeps it writes down what it waits for, announces itself and looks once
// more. All four accesses are sequentially consistent, so either the publisher sees the sleeper or the sleeper sees the
// counter; no wake-up is lost. Only the publisher whose step completes a sleeper's condition rings the bell: with more
// ranks than CPUs every needless wake-up costs a context switch.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "futex.hpp"
#include "location.hpp"
#include "patience.hpp"
#include "peers.hpp"
#include "segment.hpp"

namespace phalanx {

enum class Counter : std::uint32_t { staged = 0, combined = 1, done = 2 };

// "This counter of the rank in this seat, or of every peer (kEverySeat), has reached this value."
struct Condition {
  Counter counter;
  Seat seat;
  std::uint64_t value;
};

// A condition in one word, which threads can share. Ticks are counted one by one: they never need 51 bits.
using PackedCondition = std::uint64_t;
inline constexpr PackedCondition kNoCondition = ~PackedCondition{0};
inline constexpr int kCounterBits = 2, kSeatBits = 11;
static_assert(kMaxRanks < 1 << kSeatBits);

constexpr PackedCondition pack(const Condition& condition) noexcept {
  // kEverySeat becomes 0.
  const auto seat = static_cast<PackedCondition>(static_cast<int>(condition.seat) - static_cast<int>(kEverySeat));
  return condition.value << (kCounterBits + kSeatBits) | seat << kCounterBits |
         static_cast<PackedCondition>(condition.counter);
}

constexpr Condition unpack(PackedCondition packed) noexcept {
  const auto low = [&](int bits) { return packed & ((PackedCondition{1} << bits) - 1); };
  return {static_cast<Counter>(low(kCounterBits)),
          Seat{static_cast<int>(low(kCounterBits + kSeatBits) >> kCounterBits) + static_cast<int>(kEverySeat)},
          packed >> (kCounterBits + kSeatBits)};
}

enum class WaitResult {
  reached,
  failed,       // the group has a failure (Lines::failure)
  gone,         // a peer that the condition needs has left the group, or died
  expired,      // not yet, and `until` has passed, or somebody was woken for another condition
  interrupted,  // not yet, and a signal came
};

// Says now and then that it is time to ask the system which processes live: that is a system call for each.
class DeathWatch {
 public:
  bool due() noexcept {
    const auto now = Clock::now();
    if (now < next_) return false;
    next_ = now + std::chrono::milliseconds(10);
    return true;
  }

 private:
  Clock::time_point next_{};
};

// Two ranks whose calls agree but for the shape of a tensor.
struct ShapeNote {
  struct Side {
    int rank;
    Shape shape;
    std::string where;
  };
  std::uint64_t seq = 0;
  Op op = Op::barrier;
  Side sides[2];
};

// Conditions, which are looked at all the time, speak of seats; everything that tells of a member speaks of ranks.
class Lines {
 public:
  Lines(const Segment& segment, int rank);

  int rank() const noexcept { return rank_; }
  Seat seat() const noexcept { return seat_; }
  int size() const noexcept { return size_; }

  // Makes everything this rank wrote before visible to whoever sees the counter. Values only grow.
  void publish(Counter counter, std::uint64_t value) noexcept;
  bool reached(const Condition& condition) noexcept;
  WaitResult wait(const Condition& condition, Clock::time_point until) noexcept;
  // Lends the CPU for a while instead of sleeping; true when the condition came true, or will not any more, or
  // `stop()`.
  template <class Stop>
  bool linger(const Condition& condition, Stop&& stop) noexcept {
    return patience_.only_lend([&] { return reached(condition) || failed() || stop(); });
  }

  // For those who sleep elsewhere: announces what this rank waits for. The bell is to be slept on; none where the
  // condition has come true or will not any more. arm() once more, or disarm(), before any other wait.
  std::optional<Bell> arm(const Condition& condition) noexcept;
  void disarm() noexcept;
  // Where things stand, without waiting: reached, failed, gone or expired.
  WaitResult look(const Condition& condition) const noexcept;

  // The ranks of peers that do not meet the condition, and the first of them that will take no further step (kNoRank:
  // none).
  std::vector<int> missing(const Condition& condition) const;
  int first_gone(const Condition& condition) const noexcept;

  // The processes behind the ranks, as far as they can be watched.
  void watch(std::vector<std::shared_ptr<Peer>> peers) { peers_ = std::move(peers); }
  Leaving leaving(int rank) const noexcept {
    return static_cast<Leaving>(segment_.control(segment_.seat_of(rank)).left.load(std::memory_order_seq_cst));
  }
  // This rank will take no further step of the kind: it has left, given up on the broken group, or died, which the
  // system is asked about where `ask` says so.
  bool gone(int rank, GaveUp kind, bool ask) const noexcept;
  bool is_dead(int rank) const noexcept {
    Peer* const process = process_of(rank);
    // Ranks that are threads: who is gone is told by those who run them.
    return process != nullptr ? process->dead() : leaving(rank) != Leaving::no;
  }
  // The failure that a peer's end is.
  Failure describe_gone(int rank) const;

  // The first failure of the group, for the one who reports it (reporting.hpp).
  ReportState report_state() const noexcept {
    return ReportState(header_.report_state.load(std::memory_order_acquire));
  }
  // This rank is to publish the report with this number. False: the state has changed.
  bool claim_report(ReportState state, std::uint32_t number) noexcept;
  // False: another rank has taken over.
  bool publish_report(std::uint32_t number, const Failure& failure) noexcept;
  // Wakes all who wait in the group.
  void ring_all() noexcept;
  // Sleeps until something happens in the group. False: a signal came.
  bool nap(Clock::time_point until) const noexcept;
  // What nap() sleeps on.
  Bell bell() const noexcept { return {&header_.bell, header_.bell.load(std::memory_order_seq_cst)}; }

  // From now on a failure ends all waits, whatever it is.
  void let_nobody_wait() noexcept { header_.aborted.store(1, std::memory_order_seq_cst); }
  bool failed() const noexcept { return report_state().is_published(); }
  Failure failure() const;
  // Whose testimonies belong to the failure.
  std::uint32_t report() const noexcept { return report_state().report(); }
  // False: calls that do not need the rank that was lost may go on.
  bool failed_for_all() const;
  // This rank has seen the failure and takes no further step of the kind.
  void give_up(GaveUp kind) noexcept;

  // Lets peers know where in the program a call is made. One thread at a time: those who come from Python hold the GIL.
  void publish_location(const Location* location) noexcept;
  // Empty where it is not known, or not known any more.
  std::string location_text(int rank, std::uint32_t id) const;
  // Writes down, for the report that this rank has claimed, what a rank called (0: nothing), the last call that it
  // completed, of those up to `latest`, and the last one of the kind that it refused.
  void testify(std::uint32_t report, int rank, LaneKind kind, std::uint64_t called, std::uint64_t latest) noexcept;
  // To be told to the user, once.
  void note(ShapeNote note);
  std::optional<ShapeNote> take_note();

  // This rank takes part in no further call. Wakes everybody who might wait for it.
  void leave(Leaving leaving) noexcept;
  // What peers are told when this rank has ended. The first words stay.
  void say_last_words(const std::string& text) noexcept;
  std::string last_words(int rank) const;
  std::int32_t exit_status(int rank) const noexcept;

 private:
  bool reached_now(const Condition& condition) const noexcept;
  bool shares_cpu(const Condition& condition) const noexcept;
  Peer* process_of(int rank) const noexcept {
    return peers_.empty() ? nullptr : peers_[static_cast<std::size_t>(rank)].get();
  }
  void ring_if_complete(Counter counter, std::uint64_t before, std::uint64_t now) noexcept;
  // Whether load(seat) has reached the value in all seats that the condition of the one in seat `waiter` is about.
  template <class Fn>
  bool all_peers(const Condition& condition, Seat waiter, Fn&& load) const noexcept;

  const Segment& segment_;
  Header& header_;
  const int rank_;
  const Seat seat_;
  const int size_;
  Patience patience_;
  std::vector<std::shared_ptr<Peer>> peers_;
  mutable DeathWatch deaths_;
  bool armed_ = false;
  std::uint64_t published_[3] = {0, 0, 0};
  std::vector<std::uint64_t> seen_[3];  // what this rank last read of its peers' counters, by seat
  ShapeNote note_;
  std::atomic<bool> noted_{false};
};

}  // namespace phalanx
