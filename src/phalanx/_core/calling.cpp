#include "calling.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include "long_waits.hpp"
#include "main_thread.hpp"
#include "memory.hpp"

namespace phalanx {

namespace {

Clock::time_point after(double seconds, Clock::time_point now = Clock::now()) {
  return now + std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e9)));
}

// Without the lock of the calling thread for its lifetime.
class Released {
 public:
  explicit Released(CallHooks& hooks) : hooks_(hooks) { hooks_.release(); }
  ~Released() { hooks_.take_back(); }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  CallHooks& hooks_;
};

// Why a call can't even be handed over; `finished` where it can.
Result refusal(GroupEnd& group) {
  if (group.forked()) return Result::forked;
  if (group.has_left()) return Result::left;
  return group.broken() ? Result::was_broken : Result::finished;
}

// For a call that is about to be handed over. `finished`: it can be.
Result prepare(GroupEnd& group, CallTicket& ticket, double timeout, bool is_async, CallHooks& hooks) {
  ticket.request.is_waited_for = !is_async;
  ticket.request.engine = Engine::shm;
  const Result refused = refusal(group);
  if (refused == Result::finished) group.refusals().call_made();
  if (refused == Result::was_broken) group.calls().give_up_if_idle();
  ticket.made = Clock::now();
  ticket.deadline = after(timeout, ticket.made);
  // The first call after the group broke is recorded, too: this rank came, although late.
  const bool came_late = refused == Result::was_broken && group.first_refusal();
  if ((refused == Result::finished || came_late) && group.explains()) {
    hooks.record_call(group, ticket, timeout, is_async);
  }
  if (came_late) {
    ticket.entry.number(group.seq() + 1);
    group.member().blame(ticket, refused);
    ticket.entry.end(false);
  }
  return refused;
}

// The groups in whose calls this thread is: a signal handler may interrupt one to make another.
class Within {
 public:
  explicit Within(const GroupEnd& group) { groups().push_back(&group); }
  ~Within() { groups().pop_back(); }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;
  static bool one_of(const GroupEnd& group) {
    return std::find(groups().begin(), groups().end(), &group) != groups().end();
  }

 private:
  static std::vector<const GroupEnd*>& groups() {
    thread_local std::vector<const GroupEnd*> groups;
    return groups;
  }
};

// Tells of a wait that takes long: once that it does, and now and then that a peer has refused a call.
class LongWait {
 public:
  LongWait(CallHooks& hooks, const Member& member, std::uint64_t token, const Ticket& ticket, Op op,
           Clock::time_point beginning, bool is_bounded = false)
      : hooks_(hooks),
        member_(member),
        token_(token),
        ticket_(ticket),
        op_(op),
        beginning_(beginning),
        is_bounded_(is_bounded),
        slow_at_(hooks.slow_at(beginning)),
        refused_at_(ticket.made + kRefusalGrace),
        long_at_(beginning + LongWaits::threshold()) {}
  ~LongWait() {
    if (registered_ != 0) long_waits().remove(registered_);
  }
  LongWait(const LongWait&) = delete;
  LongWait& operator=(const LongWait&) = delete;
  Clock::time_point next() const noexcept { return std::min({slow_at_, refused_at_, long_at_}); }
  void tell_if_due(const Lane& lane) {
    const auto now = Clock::now();
    if (now >= long_at_ && ticket_.pending()) enroll();
    const bool is_slow = now >= slow_at_;
    const bool is_refused = now >= refused_at_ && member_.refusals.any();
    if (is_slow) slow_at_ = Clock::time_point::max();
    // A peer that tries again at once is not told of.
    if (now >= refused_at_) refused_at_ = now + kRefusalGrace;
    if (!is_slow && !is_refused) return;
    const bool has_tag = is_message(op_);
    const WaitingCall call{token_, op_, ticket_.seq.load(std::memory_order_relaxed),
                           has_tag ? static_cast<const MessageTicket&>(ticket_).call.tag : 0,
                           lane.missing_for(ticket_)};
    if (is_refused && ticket_.pending()) hooks_.tell_refused(call);
    if (is_slow && ticket_.pending()) hooks_.tell_slow(call);
  }

 private:
  void enroll() {
    long_at_ = Clock::time_point::max();
    WaitingThread wait{.thread = static_cast<pid_t>(::syscall(SYS_gettid)),
                       .group = token_,
                       .op = op_,
                       .seq = ticket_.seq.load(std::memory_order_relaxed),
                       .is_bounded = is_bounded_,
                       .since = beginning_};
    if (is_message(op_)) {
      const auto& message = static_cast<const MessageTicket&>(ticket_);
      wait.peer = message.call.peer;
      wait.tag = message.call.tag;
      wait.where = text_of(message.location);
    } else {
      wait.where = text_of(static_cast<const CallTicket&>(ticket_).request.location);
    }
    registered_ = long_waits().add(std::move(wait));
    hooks_.tell_long();
  }

  CallHooks& hooks_;
  const Member& member_;
  const std::uint64_t token_;
  const Ticket& ticket_;
  const Op op_;
  const Clock::time_point beginning_;
  const bool is_bounded_;
  Clock::time_point slow_at_;
  Clock::time_point refused_at_;
  Clock::time_point long_at_;
  std::uint64_t registered_ = 0;  // in long_waits(); 0: not yet
};

// Waits for a call whose memory may be gone when this returns.
Result carry_out(GroupEnd& group, const std::shared_ptr<CallTicket>& ticket, CallHooks& hooks) {
  const Within within(group);
  CallQueue& calls = group.calls();
  LongWait watch(hooks, group.member(), group.token, *ticket, ticket->request.op, ticket->made);
  bool submitted = false;
  while (true) {
    Result result;
    {
      const InCall in_call;
      const auto until = std::min(hooks.next_look(), watch.next());
      const Released released(hooks);
      if (!std::exchange(submitted, true)) calls.submit(ticket, Handing::waited_for);
      result = calls.wait(*ticket, until);
    }
    if (result != Result::pending) return result;
    try {
      watch.tell_if_due(calls);
      hooks.look_at_signals();
    } catch (const std::exception&) {
      {
        const Released released(hooks);
        group.abort("interrupted in the middle of a call");
        calls.wait(*ticket, Clock::time_point::max());
      }
      throw;
    }
  }
}

}  // namespace

std::shared_ptr<CallTicket> ticket_of_thread() {
  thread_local std::shared_ptr<CallTicket> spare;
  if (!spare || spare.use_count() != 1) spare = std::make_shared<CallTicket>();
  std::atomic_thread_fence(std::memory_order_acquire);
  spare->reopen();
  return spare;
}

Outcome run_call(GroupEnd& group, const std::shared_ptr<CallTicket>& ticket, double timeout, CallHooks& hooks) {
  if (Within::one_of(group)) return {Result::nested, 0};
  const Result refused = prepare(group, *ticket, timeout, false, hooks);
  const Result result = refused != Result::finished ? refused : carry_out(group, ticket, hooks);
  return {result, ticket->seq.load(std::memory_order_relaxed)};
}

Result start_call(GroupEnd& group, const std::shared_ptr<CallTicket>& ticket, double timeout, CallHooks& hooks) {
  const Result refused = prepare(group, *ticket, timeout, true, hooks);
  if (refused != Result::finished) return refused;
  const Request& request = ticket->request;
  const bool is_short =
      std::max(request.in.largest(), request.out.largest()) <= group.segment().header().tuning.one_shot_bytes;
  // Neither takes long: others do what a long call needs.
  group.calls().submit(ticket, is_short ? Handing::at_once : Handing::later);
  return ticket->result() == Result::finished ? Result::finished : Result::pending;
}

Result start_message(GroupEnd& group, const std::shared_ptr<MessageTicket>& ticket, double timeout, CallHooks& hooks) {
  const Description& call = ticket->call;
  if (!ticket->sends() && !writable(ticket->data)) return Result::not_writable;
  const Result refused = refusal(group);
  if (refused == Result::was_broken) group.messages().give_up_if_idle();
  if (refused != Result::finished) return refused;
  group.refusals().message_made(ticket->sends(), call.peer, call.tag);
  ticket->call.engine = Engine::shm;
  ticket->made = Clock::now();
  ticket->deadline = after(timeout, ticket->made);
  if (group.explains()) hooks.record_call(group, *ticket, timeout);
  {
    const Released released(hooks);
    group.messages().submit(ticket);
  }
  return call.peer != kAnySource && ticket->result() == Result::finished ? Result::finished : Result::pending;
}

Lane::Rest drain(GroupEnd& group, CallHooks& hooks) {
  // The call that a signal handler has interrupted has nobody to wait for it here.
  if (group.forked() || group.has_left() || Within::one_of(group)) return Lane::Rest::nothing;
  const Released released(hooks);
  Lane::Rest rest = Lane::Rest::nothing;
  for (Lane* lane : {static_cast<Lane*>(&group.calls()), static_cast<Lane*>(&group.messages())}) {
    const Lane::Rest found = lane->drain(Clock::now() + kBetweenSignals / 2);
    if (rest != Lane::Rest::moving && found != Lane::Rest::nothing) rest = found;
  }
  return rest;
}

CallInFlight::CallInFlight(const GroupEnd& group, std::shared_ptr<CallTicket> ticket)
    : CallInFlight(group, group.calls_lane(), ticket->request.op) {
  ticket_ = std::move(ticket);
}

CallInFlight::CallInFlight(const GroupEnd& group, std::shared_ptr<MessageTicket> ticket)
    : CallInFlight(group, group.messages_lane(), ticket->call.op) {
  ticket_ = std::move(ticket);
}

CallInFlight::CallInFlight(const GroupEnd& group, std::shared_ptr<Lane> lane, Op op)
    : member_(group.shared_member()),
      lane_(std::move(lane)),
      generation_(fork_generation()),
      token_(group.token),
      op_(op) {}

Result CallInFlight::poll() const noexcept {
  const Result found = result();
  if (found == Result::pending) lane_->hurry();
  return found;
}

bool CallInFlight::notify(std::uint64_t token) const noexcept {
  if (forked() || !ticket_->notify(token)) return false;
  lane_->hurry();
  return true;
}

Result CallInFlight::wait(double timeout, CallHooks& hooks) const {
  const auto until = timeout < 0 ? Clock::time_point::max() : after(timeout);
  LongWait watch(hooks, *member_, token_, *ticket_, op_, Clock::now(), timeout >= 0);
  while (result() == Result::pending) {
    {
      const InCall in_call;
      const auto next = std::min({until, hooks.next_look(), watch.next()});
      const Released released(hooks);
      lane_->wait(*ticket_, next);
    }
    if (Clock::now() >= until) break;
    watch.tell_if_due(*lane_);
    hooks.look_at_signals();
  }
  return result();
}

}  // namespace phalanx
