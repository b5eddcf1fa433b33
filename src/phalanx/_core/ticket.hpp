// One call that has been handed over, from then until it has ended: what whoever waits for it holds in hand.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "black_box.hpp"
#include "call.hpp"
#include "completions.hpp"
#include "float_mode.hpp"
#include "statistics.hpp"

namespace phalanx {

// What became of a call.
enum class Result : int {
  finished = 0,
  failed = 1,      // GroupEnd::failure() says how
  was_broken = 2,  // by a failure that was not this call's own
  forked = 3,
  nested = 4,
  left = 5,
  no_memory = 6,
  pending = 7,
  no_space = 8,
  not_writable = 9,
};

class Ticket {
 public:
  Ticket() = default;
  virtual ~Ticket() = default;
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  // From any thread. What the call wrote is visible to whoever sees that it has ended.
  Result result() const noexcept { return result_.load(std::memory_order_acquire); }
  bool pending() const noexcept { return result() == Result::pending; }
  // The token goes to the completions when the call ends. False: it has ended already, and it does not.
  bool notify(std::uint64_t token) noexcept {
    std::uint64_t nobody = kNobody;
    return token_.compare_exchange_strong(nobody, token, std::memory_order_acq_rel);
  }

  // What a call that ends now adds to the statistics.
  Statistics::Sum cost(Result result, std::uint64_t bytes, Clock::time_point now) const noexcept {
    constexpr Clock::time_point kNotYet{};
    Statistics::Sum sum{1, result == Result::finished ? bytes : 0};
    if (began == kNotYet) return sum;
    // Threads look at the clock before they take the lane: times of two of them may be out of order.
    const Clock::time_point end = std::max(began, now);
    const Clock::time_point met_at = met == kNotYet ? end : std::clamp(met, began, end);
    sum.waiting = met_at - began;
    sum.moving = end - met_at;
    return sum;
  }

  // By whoever holds the lane.
  void end(Result result, Clock::time_point now = Clock::now()) noexcept {
    // First: whoever sees the result may use the ticket again.
    entry.end(result == Result::finished, now, last_arriver);
    result_.store(result, std::memory_order_release);
    const std::uint64_t token = token_.exchange(kEnded, std::memory_order_acq_rel);
    if (token != kNobody) completions().push(token);
  }

  Clock::time_point made{};
  Clock::time_point deadline = Clock::time_point::max();
  std::atomic<std::uint64_t> seq{0};  // 0 until it is known
  std::atomic<int> source{-1};        // of a message that was received
  // For the statistics, by whoever holds the lane: when the call began, and when the last peer that it needs came. The
  // epoch: not yet.
  Clock::time_point began{};
  Clock::time_point met{};
  std::int32_t last_arriver = kNoRank;  // the peer that came last, as far as it is known
  BoxEntry entry;
  bool asked = false;  // whoever is missing was asked where it is; by whoever holds the lane

 protected:
  // For a ticket that is used again.
  void reopen() noexcept {
    result_.store(Result::pending, std::memory_order_relaxed);
    token_.store(kNobody, std::memory_order_relaxed);
    seq.store(0, std::memory_order_relaxed);
    began = met = Clock::time_point();
    last_arriver = kNoRank;
    entry = BoxEntry();
    asked = false;
  }

 private:
  static constexpr std::uint64_t kNobody = 0;
  static constexpr std::uint64_t kEnded = ~std::uint64_t{0};
  std::atomic<Result> result_{Result::pending};
  std::atomic<std::uint64_t> token_{kNobody};
};

// One side of a collective.
class CallTicket : public Ticket {
 public:
  void reopen() noexcept {
    Ticket::reopen();
    static_cast<Description&>(request) = Description();
    request.location = nullptr;
  }
  Request request;
  FloatMode float_mode;
  bool is_short = false;         // the thread that hands over a call may carry this one out
  bool began_when_made = false;  // whoever made it goes on with it, and nothing was before it
};

// One side of a message.
class MessageTicket : public Ticket {
 public:
  bool sends() const noexcept { return call.op == Op::send; }
  Description call;
  const Location* location = nullptr;
  Piece data{nullptr, 0};
};

}  // namespace phalanx
