// Calls of one rank that go on side by side with those of other lanes: the collectives of a group, or its messages.
//
// Whoever holds a lane advances all that is in it: a thread that waits for one of its calls, or the progress thread
// (progress.hpp) when nobody waits. Handing over a call takes no lane. A holder that lets go of a lane in which
// something is still pending wakes the progress thread, so that no call is ever forgotten.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "progress.hpp"
#include "reporting.hpp"
#include "ticket.hpp"

namespace phalanx {

// A call that has not ended, as it stands when nothing can be done for it at the moment.
struct PendingCall {
  Op op;
  std::uint64_t seq;
  int peer = kNoRank;        // of a message
  std::uint32_t tag = 0;     // of a message
  bool is_matched = false;   // of a message: both sides have met, and its bytes move
  std::vector<int> missing;  // the ranks for which it waits
  std::string where;         // the line of the program that made it
};

class Lane : public Tendable {
 public:
  // Goes on with the lane until the ticket has ended, `until` has passed or a signal came (both: pending).
  Result wait(const Ticket& ticket, Clock::time_point until);
  // The peers that the ticket's call waits for; none while it advances. Answers at once, whoever holds the lane.
  std::vector<int> missing_for(const Ticket& ticket) const {
    return ticket.pending() ? missing(ticket) : std::vector<int>();
  }
  // Somebody looks whether a call has ended, or wants to hear of it, and does not wait: it must not be left pending.
  void hurry() noexcept;
  bool idle() const noexcept final { return pending_.load(std::memory_order_seq_cst) == 0; }
  Tended tend(bool urgent, Sleep& sleep) final;
  // For a rank that is about to leave: goes on with all calls of the lane until they have ended, or until `until`.
  enum class Rest {
    nothing,
    moving,   // a call has ended since the lane was last drained, or all who take part in the next one have made it
    waiting,  // a peer has not made its side of the next call
  };
  Rest drain(Clock::time_point until);
  // What is pending once all is done that can be done now: the first collective, or all messages. None where the lane
  // could not be had until then, or has something to do all the time.
  std::optional<std::vector<PendingCall>> look(Clock::time_point until);
  // Ends what is pending, as far as this rank's group says that it must, unless another thread does within a second.
  void sweep();

 protected:
  explicit Lane(Lines& lines) noexcept : reporting_(lines) {}

  // All with the lane held.
  //
  // Does what can be done without waiting; true when it did something and may have more to do at once. `now` is a time
  // just before: what peers did is known to have happened by then.
  virtual bool advance(Clock::time_point now) = 0;
  // The same for a thread that hands over a call: leaves out the steps of calls that take long.
  virtual bool advance_briefly(Clock::time_point now) = 0;
  // Ends the calls that can't be carried out any more, once advance() has nothing to do: a peer is gone, the time is
  // up, or the group has failed. Breaks the group where that is news to it.
  virtual void fail_stuck_calls() = 0;
  // Whether all who take part in a call of the lane, the next one if they have an order, have made it.
  virtual bool everybody_came() = 0;
  // For look().
  virtual std::vector<PendingCall> list_pending() const = 0;
  enum class News { some, none, interrupted };
  // Waits for something to do: a while on the CPU, then asleep, 50 ms at most. Not while a failure is reported.
  virtual News wait_for_news(Clock::time_point until) = 0;
  // Breaks the group with what this rank has found, unless a failure is being reported already; then end_reported().
  // Meanwhile advance() does nothing but go_on_reporting(), and fail_stuck_calls() nothing at all.
  void report(Finding finding, Clock::time_point now);
  bool go_on_reporting(Clock::time_point now);
  // The group has a failure now: ends what fails by the report of this lane.
  virtual void end_reported() = 0;
  // Lends the CPU for a while, for the progress thread; true when there is something to do, or the lane is wanted.
  virtual bool linger() = 0;
  // Announces that this rank sleeps. None: there is something to do.
  virtual std::optional<Bell> arm() = 0;
  virtual void disarm() = 0;
  // arm() for the progress thread, which sleeps on the bell; false: it has to look by itself.
  virtual bool arm_again() = 0;

  // From any thread, without the lane.
  virtual std::vector<int> missing(const Ticket& ticket) const = 0;

  bool try_acquire() { return free_.try_lock(); }
  bool acquire(Clock::time_point until);
  void release();
  // With the lane held: the holder, or the progress thread when it has been woken, looks after it from now on.
  void stop_watching();
  // For those who hand over a call: goes on with it right here if that may end it soon, else leaves it to others.
  void hand_over(const Ticket& ticket, bool at_once);
  // Another thread waits for the lane.
  bool wanted() const noexcept { return waiting_.load(std::memory_order_relaxed) > 0; }
  // The holder, if it sleeps, has something new to do.
  virtual void wake_holder() noexcept = 0;

  // A ticket of this lane has ended.
  void count_end() noexcept {
    num_ended_.fetch_add(1, std::memory_order_relaxed);
    pending_.fetch_sub(1, std::memory_order_seq_cst);
  }
  void count_begin() noexcept { pending_.fetch_add(1, std::memory_order_seq_cst); }

  Reporting reporting_;

 private:
  // Until a thread in look() has had the lane, or for a moment.
  void let_look() const noexcept;
  // For whoever waits: news, or the next step of a report.
  News wait_for_step(Clock::time_point until);

  std::timed_mutex free_;
  // The progress thread sleeps on the bell of this lane. Set with the lane held.
  std::atomic<bool> watched_{false};
  std::atomic<int> waiting_{0};
  // Threads in look(): the holder lets them have the lane.
  std::atomic<int> looking_{0};
  std::atomic<std::size_t> pending_{0};
  std::atomic<std::uint64_t> num_ended_{0};
  std::uint64_t num_ended_seen_ = 0;  // by the progress thread
  std::uint64_t num_drained_ = 0;     // those that had ended when the lane was last drained; with the lane held
};

}  // namespace phalanx
