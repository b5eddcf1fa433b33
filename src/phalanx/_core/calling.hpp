// How a call is made: prepared, handed to a lane of its group, waited for, and given up where its thread is
// interrupted.
//
// There is no Python here. What the engine needs of the thread that makes a call it asks of CallHooks: bind_calls.cpp
// answers for Python, tests/native/calling.cpp for a test.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "group_end.hpp"

namespace phalanx {

// How long the core works or waits before the thread looks at what only it can do: Python's signal handlers.
inline constexpr std::chrono::milliseconds kBetweenSignals{50};

// A call that waits for long, as the thread that made it is told.
struct WaitingCall {
  std::uint64_t group;  // GroupEnd::token
  Op op;
  std::uint64_t seq;
  std::uint32_t tag;         // of a message
  std::vector<int> missing;  // the ranks it waits for
};

// What the engine asks of the thread that makes a call or waits for one. The thread holds a lock of its own, Python's
// GIL, in all of these but between release() and take_back(). Those that say so may throw a std::exception, which ends
// the wait.
class CallHooks {
 public:
  CallHooks() = default;
  virtual ~CallHooks() = default;
  CallHooks(const CallHooks&) = delete;
  CallHooks& operator=(const CallHooks&) = delete;

  // Around everything that moves bytes or waits.
  virtual void release() = 0;
  virtual void take_back() noexcept = 0;

  // Writes down where the call comes from, for reports and in the black box, before it is handed over.
  virtual void record_call(GroupEnd& group, CallTicket& ticket, double timeout, bool is_async) = 0;
  virtual void record_call(GroupEnd& group, MessageTicket& ticket, double timeout) = 0;

  // When this thread has to look at signals next; Clock::time_point::max(): it has none to look at.
  virtual Clock::time_point next_look() = 0;
  // May throw: the program was interrupted.
  virtual void look_at_signals() = 0;

  // When a wait that begins then is to be told as a slow one.
  virtual Clock::time_point slow_at(Clock::time_point beginning) = 0;
  // A wait has begun that is in long_waits() now. May throw.
  virtual void tell_long() = 0;
  // Once per wait. May throw.
  virtual void tell_slow(const WaitingCall& call) = 0;
  // Some rank has refused a call: it may be the one that this call waits for. Now and then. May throw.
  virtual void tell_refused(const WaitingCall& call) = 0;
};

// What became of a call; its seq, or 0 where it was not handed over.
struct Outcome {
  Result result;
  std::uint64_t seq;
};

// The ticket has its request, or its message; the engine sets everything else. Timeouts are in seconds.
//
// Carries out a call. What a hook throws aborts the group first: peers make this call, now or later, and a group in
// which one rank left it out is in no state to go on.
Outcome run_call(GroupEnd& group, const std::shared_ptr<CallTicket>& ticket, double timeout, CallHooks& hooks);
// Hands a call over. `pending`: it is in flight, and CallInFlight waits for it.
Result start_call(GroupEnd& group, const std::shared_ptr<CallTicket>& ticket, double timeout, CallHooks& hooks);
// The same for a message. A receive from anybody stays `pending` for its caller, who asks where it came from.
Result start_message(GroupEnd& group, const std::shared_ptr<MessageTicket>& ticket, double timeout, CallHooks& hooks);

// A ticket that the next call of this thread may use; the one of its last call, if nobody else holds that any more.
std::shared_ptr<CallTicket> ticket_of_thread();

// Goes on with the calls in flight for a moment, for a rank that is about to leave the group.
Lane::Rest drain(GroupEnd& group, CallHooks& hooks);

// A call that was handed over, until it has ended and after that.
class CallInFlight {
 public:
  CallInFlight(const GroupEnd& group, std::shared_ptr<CallTicket> ticket);
  CallInFlight(const GroupEnd& group, std::shared_ptr<MessageTicket> ticket);
  // False: it was moved from.
  explicit operator bool() const noexcept { return ticket_ != nullptr; }

  // What became of it so far. In a forked child there is neither the call nor the group's memory.
  Result result() const noexcept { return forked() ? Result::forked : ticket_->result(); }
  // The same for a thread that asks instead of waiting: wakes the progress thread, so that the call is not left
  // pending.
  Result poll() const noexcept;
  // The token goes to the completions when the call ends, which the progress thread sees to. False: it has ended.
  bool notify(std::uint64_t token) const noexcept;
  // Until it has ended, or `timeout` seconds have passed; a negative one: forever. What a hook throws ends the wait and
  // leaves the call in flight.
  Result wait(double timeout, CallHooks& hooks) const;
  // The ranks it waits for.
  std::vector<int> missing() const { return forked() ? std::vector<int>() : lane_->missing_for(*ticket_); }
  std::uint64_t seq() const noexcept { return ticket_->seq.load(std::memory_order_relaxed); }
  int source() const noexcept { return ticket_->source.load(std::memory_order_relaxed); }

 private:
  CallInFlight(const GroupEnd& group, std::shared_ptr<Lane> lane, Op op);
  bool forked() const noexcept { return generation_ != fork_generation(); }

  std::shared_ptr<const Member> member_;
  std::shared_ptr<Lane> lane_;
  std::shared_ptr<Ticket> ticket_;
  std::uint32_t generation_;
  std::uint64_t token_;
  Op op_;
};

}  // namespace phalanx
