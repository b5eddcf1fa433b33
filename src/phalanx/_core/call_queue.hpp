// The collectives of one rank in one group: one after another, in the order in which they were handed over.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "lane.hpp"
#include "member.hpp"

namespace phalanx {

// Who goes on with a call that is handed over.
enum class Handing {
  waited_for,  // the caller, who waits for it next
  at_once,     // the caller, as far as it goes without waiting; then others
  later,       // others
};

class CallQueue : public Lane {
 public:
  explicit CallQueue(std::shared_ptr<Member> member);

  // The call begins when those before it have ended. The memory in its request must stay until it has ended.
  void submit(std::shared_ptr<CallTicket> ticket, Handing handing);
  // This rank has been told that the group is broken.
  void give_up_if_idle() noexcept {
    if (idle()) member_->lines.give_up(GaveUp::calls);
  }
  // The seq of the last call that was handed over.
  std::uint64_t seq() const noexcept { return seq_.load(std::memory_order_relaxed); }

 protected:
  bool advance(Clock::time_point now) override { return go_on(now, false); }
  // At most one short call that is at the head of the queue.
  bool advance_briefly(Clock::time_point now) override { return go_on(now, true); }
  void fail_stuck_calls() override;
  void end_reported() override { fail(std::exchange(failed_, nullptr)); }
  // A call that has not begun waits for those whom the one before it waits for.
  std::vector<int> missing(const Ticket&) const override;
  bool everybody_came() override { return current_ && call_.everybody_came(); }
  std::vector<PendingCall> list_pending() const override;
  News wait_for_news(Clock::time_point until) override;
  bool linger() override {
    return current_ && !reporting_.is_under_way() &&
           member_->lines.linger(call_.blocked_on(), [&] { return wanted(); });
  }
  std::optional<Bell> arm() override {
    return reporting_.is_under_way() ? member_->lines.bell() : member_->lines.arm(call_.blocked_on());
  }
  void disarm() override { member_->lines.disarm(); }
  bool arm_again() override { return current_ && !reporting_.is_under_way() && arm().has_value(); }
  void wake_holder() noexcept override {}

 private:
  bool go_on(Clock::time_point now, bool briefly);
  bool begin_next(Clock::time_point now, bool only_short);
  void end_current(Result result);
  void end(CallTicket& ticket, Result result);
  void end_queue(Result result, const CallTicket* failed = nullptr);
  // Lane::report; `failed` is the call that fails by it.
  void report_for(std::shared_ptr<CallTicket> failed, Finding finding, Clock::time_point now);
  // Ends all: this call as failed, the others as broken by it.
  void fail(std::shared_ptr<CallTicket> failed);
  std::shared_ptr<CallTicket> find_late(Clock::time_point now);
  static Member::Doing doing(const CallTicket& ticket) noexcept;

  const std::shared_ptr<Member> member_;
  History history_;
  Call call_;
  std::shared_ptr<CallTicket> current_;  // the one that call_ carries out
  Clock::time_point ended_at_{};         // when the one before ended
  std::shared_ptr<CallTicket> failed_;   // the call that fails by what is reported
  // What current_ was blocked on last, for threads that do not hold the lane.
  std::atomic<PackedCondition> blocked_on_{kNoCondition};

  std::mutex mutex_;                                      // of the queue
  std::deque<std::shared_ptr<CallTicket>> queue_;         // those that have not begun
  Clock::time_point soonest_ = Clock::time_point::max();  // no deadline in the queue is earlier
  std::atomic<std::uint64_t> seq_{0};
};

}  // namespace phalanx
