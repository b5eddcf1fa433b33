// How ranks tell each other that they have got somewhere, and how they wait for it.
//
// A rank publishes by a sequentially consistent store to a counter of its own and then looks whether anyone sleeps.
// A waiter spins on the counters; before it sleeps it writes down what it waits for, announces itself and looks once
// more. All four accesses are sequentially consistent, so either the publisher sees the sleeper or the sleeper sees the
// counter; no wake-up is lost. Only the publisher whose step completes a sleeper's condition rings the bell: with more
// ranks than CPUs every needless wake-up costs a context switch.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "segment.hpp"

namespace phalanx {

using Clock = std::chrono::steady_clock;

enum class Counter : std::uint32_t { staged = 0, combined = 1, done = 2 };

inline constexpr int kEveryPeer = -1;

// "This counter of this peer, or of every peer, has reached this value."
struct Condition {
  Counter counter;
  int peer;
  std::uint64_t value;
};

enum class WaitResult {
  reached,
  failed,       // the group has a failure (Lines::failure)
  left,         // a peer that the condition needs has left the group
  expired,      // not yet, and `until` has passed, or somebody was woken for another condition
  interrupted,  // not yet, and a signal came
};

class Lines {
 public:
  Lines(const Segment& segment, int rank);

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

  // Makes everything this rank wrote before visible to whoever sees the counter. Values only grow.
  void publish(Counter counter, std::uint64_t value) noexcept;
  bool reached(const Condition& condition) noexcept;
  WaitResult wait(const Condition& condition, Clock::time_point until) noexcept;

  // Peers that do not meet the condition, and the first of them that has left the group (-1: none).
  std::vector<int> missing(const Condition& condition) const;
  int first_left(const Condition& condition) const noexcept;

  // The first failure is kept, later ones are dropped. Wakes everybody.
  void fail(const Failure& failure) noexcept;
  bool failed() const noexcept { return header_.failure_state.load(std::memory_order_acquire) != 0; }
  Failure failure() const;

  // This rank takes part in no further call. Wakes everybody who might wait for it.
  void leave() noexcept;

 private:
  bool reached_now(const Condition& condition) const noexcept;
  WaitResult look(const Condition& condition) const noexcept;
  bool worth_spinning(const Condition& condition) const noexcept;
  bool spin(const Condition& condition, Clock::time_point until) noexcept;
  void ring_if_complete(Counter counter, std::uint64_t before, std::uint64_t now) noexcept;
  void ring() noexcept;
  template <class Fn>
  bool all_peers(const Condition& condition, int waiter, Fn&& load) const noexcept;

  const Segment& segment_;
  Header& header_;
  const int rank_;
  const int size_;
  const bool crowded_;
  const std::chrono::nanoseconds spin_;
  // How many waits will not lend the CPU, and how many it will be after the next loan that lasts too long.
  int waits_without_lending_ = 0;
  int waits_after_long_loan_;
  std::uint64_t published_[3] = {0, 0, 0};
  std::vector<std::uint64_t> seen_[3];  // what this rank last read of its peers' counters
};

}  // namespace phalanx
