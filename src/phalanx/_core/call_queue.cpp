#include "call_queue.hpp"

#include <algorithm>
#include <utility>

namespace phalanx {

CallQueue::CallQueue(std::shared_ptr<Member> member)
    : Lane(member->lines), member_(std::move(member)), call_(*member_->segment, member_->lines, history_) {
  history_.verified.resize(static_cast<std::size_t>(member_->size()), 0);
}

void CallQueue::submit(std::shared_ptr<CallTicket> ticket, Handing handing) {
  ticket->float_mode = FloatMode();
  const std::shared_ptr<CallTicket> mine = ticket;
  {
    const std::lock_guard lock(mutex_);
    const std::uint64_t seq = seq_.fetch_add(1, std::memory_order_relaxed) + 1;
    ticket->seq.store(seq, std::memory_order_relaxed);
    ticket->entry.number(seq);
    ticket->is_short = handing == Handing::at_once;
    ticket->began_when_made = handing == Handing::waited_for && idle();
    count_begin();
    soonest_ = std::min(soonest_, ticket->deadline);
    queue_.push_back(std::move(ticket));
  }
  if (handing != Handing::waited_for) hand_over(*mine, handing == Handing::at_once);
  // Nobody tends the lane of a rank that has left, and leave() may have swept it just before.
  if (member_->has_left()) sweep();
}

bool CallQueue::begin_next(Clock::time_point now, bool only_short) {
  {
    const std::lock_guard lock(mutex_);
    if (queue_.empty() || (only_short && !queue_.front()->is_short)) return false;
    current_ = std::move(queue_.front());
    queue_.pop_front();
  }
  if (member_->has_left()) {
    end_current(Result::left);
  } else if (member_->lines.failed()) {
    member_->lines.give_up(GaveUp::calls);
    end_current(Result::was_broken);
  } else {
    // A call that nothing was in the way of began when it was made. Times of calls never overlap, although the one
    // before may have ended between a look at the clock and this.
    current_->began = std::max(current_->made, current_->began_when_made ? ended_at_ : std::max(now, ended_at_));
    current_->entry.start(current_->began);
    call_.start(current_->request, current_->began);
  }
  return true;
}

void CallQueue::end_current(Result result) {
  const std::shared_ptr<CallTicket> ended = std::exchange(current_, nullptr);
  blocked_on_.store(kNoCondition, std::memory_order_relaxed);
  ended->met = call_.met_at();
  ended->last_arriver = call_.last_arriver();
  end(*ended, result);
}

void CallQueue::end(CallTicket& ticket, Result result) {
  count_end();
  member_->blame(ticket, result);
  ended_at_ = Clock::now();
  const Request& request = ticket.request;
  const std::uint64_t bytes = std::max(request.in.total(), request.out.total());
  member_->statistics->add(request.op, ticket.cost(result, bytes, ended_at_));
  ticket.end(result, ended_at_);
}

void CallQueue::end_queue(Result result, const CallTicket* failed) {
  std::deque<std::shared_ptr<CallTicket>> queue;
  {
    const std::lock_guard lock(mutex_);
    queue.swap(queue_);
  }
  for (const auto& ticket : queue) end(*ticket, ticket.get() == failed ? Result::failed : result);
}

// One call at most comes to its end, so that whoever waits for it can look.
bool CallQueue::go_on(Clock::time_point now, bool briefly) {
  if (!current_ && !begin_next(now, briefly)) return false;
  if (!current_) return true;
  if (reporting_.is_under_way()) return go_on_reporting(now);
  if (briefly && !current_->is_short) return false;
  const FloatMode::Scope scope(current_->float_mode);
  switch (call_.advance(now)) {
    case Advance::finished:
      end_current(Result::finished);
      return true;
    case Advance::failed:
      report_for(current_, call_.finding(), now);
      return !reporting_.is_under_way();
    case Advance::more:
      return true;
    case Advance::blocked:
      blocked_on_.store(pack(call_.blocked_on()), std::memory_order_relaxed);
      break;
  }
  return false;
}

std::vector<int> CallQueue::missing(const Ticket&) const {
  const PackedCondition packed = blocked_on_.load(std::memory_order_relaxed);
  return packed == kNoCondition ? std::vector<int>() : member_->lines.missing(unpack(packed));
}

std::vector<PendingCall> CallQueue::list_pending() const {
  if (!current_) return {};
  const Request& request = current_->request;
  return {{.op = request.op,
           .seq = current_->seq.load(std::memory_order_relaxed),
           .missing = member_->lines.missing(call_.blocked_on()),
           .where = text_of(request.location)}};
}

void CallQueue::report_for(std::shared_ptr<CallTicket> failed, Finding finding, Clock::time_point now) {
  failed_ = std::move(failed);
  report(std::move(finding), now);
}

void CallQueue::fail(std::shared_ptr<CallTicket> failed) {
  member_->lines.give_up(GaveUp::calls);
  end_current(failed == current_ ? Result::failed : Result::was_broken);
  end_queue(Result::was_broken, failed.get());
}

// A call whose time is up before those before it have ended can't be left out: peers will make it, and would then meet
// the one behind it.
std::shared_ptr<CallTicket> CallQueue::find_late(Clock::time_point now) {
  if (current_->deadline <= now) return current_;
  const std::lock_guard lock(mutex_);
  if (now < soonest_) return nullptr;
  soonest_ = Clock::time_point::max();
  for (const auto& ticket : queue_) {
    soonest_ = std::min(soonest_, ticket->deadline);
    if (ticket->deadline <= now) return ticket;
  }
  return nullptr;
}

void CallQueue::fail_stuck_calls() {
  if (member_->has_left()) {
    reporting_.end_now(Clock::now());
    failed_.reset();
    if (current_) end_current(Result::left);
    return end_queue(Result::left);
  }
  if (!current_ || reporting_.is_under_way()) return;
  const Condition& condition = call_.blocked_on();
  switch (member_->lines.look(condition)) {
    case WaitResult::reached:
    case WaitResult::interrupted:
      return;
    case WaitResult::failed:
      return fail(current_);
    case WaitResult::gone: {
      const int peer = member_->lines.first_gone(condition);
      if (peer < 0) return;
      return report_for(current_, {member_->end_of(peer, doing(*current_))}, Clock::now());
    }
    case WaitResult::expired:
      break;
  }
  const auto now = Clock::now();
  if (!call_.compare_with_those_who_came()) return report_for(current_, call_.finding(), now);
  const std::shared_ptr<CallTicket> late = find_late(now + Member::kAskBefore);
  if (!late || (late->asked && now < late->deadline)) return;
  const std::vector<int> missing = member_->lines.missing(condition);
  if (missing.empty()) return;
  if (!late->asked) member_->ask_missing(*late, missing);
  if (now < late->deadline) return;
  report_for(late, {member_->timeout_of(doing(*late), missing)}, now);
}

Lane::News CallQueue::wait_for_news(Clock::time_point until) {
  if (!current_) return News::none;
  switch (member_->lines.wait(call_.blocked_on(), std::min(until, current_->deadline))) {
    case WaitResult::reached:
      return News::some;
    case WaitResult::interrupted:
      return News::interrupted;
    default:
      return News::none;
  }
}

Member::Doing CallQueue::doing(const CallTicket& ticket) noexcept {
  return {ticket.request, ticket.seq.load(std::memory_order_relaxed), ticket.request.location, ticket.asked};
}

}  // namespace phalanx
