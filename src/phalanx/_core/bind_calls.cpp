#include "bind_calls.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bind_debug.hpp"
#include "bind_records.hpp"
#include "gil.hpp"
#include "memory.hpp"

namespace nb = nanobind;

namespace phalanx {

ReduceFn kernel_of(int dtype, int op) {
  if (dtype < 0 || dtype >= static_cast<int>(kNumReducible) || op < 0 || op >= static_cast<int>(kNumReduceOps))
    return nullptr;
  return reduce_kernel(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
}

namespace {

// How long the core works or waits before Python's signal handlers get their turn.
constexpr std::chrono::milliseconds kBetweenSignals{50};

// Only the main thread has signals to look at. Asked of the system once, and once more after a fork: then the thread
// that forked is the main one.
bool on_main_thread() {
  thread_local std::uint32_t asked_in = 0;
  thread_local bool is_main = false;
  if (asked_in != fork_generation() + 1) {
    is_main = ::syscall(SYS_gettid) == ::getpid();
    asked_in = fork_generation() + 1;
  }
  return is_main;
}

// The generation of forks in which the main thread waits in a call of ours, plus 1; 0: it does not. Peers ask where it
// is, and plain calls have no Python frame that would tell.
std::atomic<std::uint32_t> main_thread_in_call{0};

class InCall {
 public:
  InCall() : counts_(on_main_thread()), before_(counts_ ? main_thread_in_call.load(std::memory_order_relaxed) : 0) {
    if (counts_) main_thread_in_call.store(fork_generation() + 1, std::memory_order_relaxed);
  }
  ~InCall() {
    if (counts_) main_thread_in_call.store(before_, std::memory_order_relaxed);
  }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  const bool counts_;
  const std::uint32_t before_;
};

// When to come back for signals.
Clock::time_point next_look() { return on_main_thread() ? Clock::now() + kBetweenSignals : Clock::time_point::max(); }

Clock::time_point after(double seconds, Clock::time_point now = Clock::now()) {
  return now + std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e9)));
}

// Why a call can't even be handed over; `finished` where it can.
Result refusal(Group& group) {
  if (group.forked()) return Result::forked;
  if (group.has_left()) return Result::left;
  return group.broken() ? Result::was_broken : Result::finished;
}

// For a call that is about to be handed over. `finished`: it can be.
Result prepare(Group& group, CallTicket& ticket, double timeout, bool is_async) {
  ticket.request.is_waited_for = !is_async;
  ticket.request.engine = Engine::shm;
  const Result refused = refusal(group);
  if (refused == Result::finished) group.refusals().call_made();
  if (refused == Result::was_broken) group.calls().give_up_if_idle();
  ticket.made = Clock::now();
  ticket.deadline = after(timeout, ticket.made);
  // Of a broken group the first call is recorded, too: this rank came, although late.
  const bool came_late = refused == Result::was_broken && group.first_refusal();
  if ((refused == Result::finished || came_late) && group.explains()) describe(group, ticket, timeout, is_async);
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
  explicit Within(const Group& group) { groups().push_back(&group); }
  ~Within() { groups().pop_back(); }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;
  static bool one_of(const Group& group) {
    return std::find(groups().begin(), groups().end(), &group) != groups().end();
  }

 private:
  static std::vector<const Group*>& groups() {
    thread_local std::vector<const Group*> groups;
    return groups;
  }
};

// Whoever waits looks so often whether a peer has refused the call. A peer that tries again at once is not told of.
constexpr std::chrono::milliseconds kBetweenRefusals = kRefusalGrace;

// Has Python told of a wait that takes long: once of who is absent, and of peers that have refused the call.
class LongWait {
 public:
  LongWait(const Member& member, std::uint64_t token, const Ticket& ticket, Op op, Clock::time_point beginning) noexcept
      : member_(member),
        token_(token),
        ticket_(ticket),
        op_(op),
        slow_at_(slow_at(beginning)),
        refused_at_(ticket.made + kBetweenRefusals) {}
  Clock::time_point at() const noexcept { return std::min(slow_at_, refused_at_); }
  void look(const Lane& lane) {
    const auto now = Clock::now();
    const bool is_slow = now >= slow_at_;
    const bool is_refused = now >= refused_at_ && member_.refusals.any();
    if (is_slow) slow_at_ = Clock::time_point::max();
    if (now >= refused_at_) refused_at_ = now + kBetweenRefusals;
    if (!is_slow && !is_refused) return;
    const std::vector<int> missing = lane.missing_for(ticket_);
    const std::uint64_t seq = ticket_.seq.load(std::memory_order_relaxed);
    const bool is_message = phalanx::is_message(op_);
    const std::uint32_t tag = is_message ? static_cast<const MessageTicket&>(ticket_).call.tag : 0;
    if (is_refused && ticket_.pending()) tell_refused(token_, op_, seq, tag, missing);
    if (is_slow && ticket_.pending()) tell_slow(token_, op_, seq, missing);
  }

 private:
  const Member& member_;
  const std::uint64_t token_;
  const Ticket& ticket_;
  const Op op_;
  Clock::time_point slow_at_;
  Clock::time_point refused_at_;
};

// Waits for a call whose memory may be gone when this returns.
Result carry_out(Group& group, const std::shared_ptr<CallTicket>& ticket) {
  const Within within(group);
  CallQueue& calls = group.calls();
  LongWait watch(group.member(), group.token, *ticket, ticket->request.op, ticket->made);
  bool submitted = false;
  while (true) {
    Result result;
    {
      const InCall in_call;
      WithoutGil without;
      if (!std::exchange(submitted, true)) calls.submit(ticket, Handing::waited_for);
      result = calls.wait(*ticket, std::min(next_look(), watch.at()));
    }
    if (result != Result::pending) return result;
    try {
      watch.look(calls);
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    } catch (const nb::python_error& error) {
      // Peers make this call, now or later: a group in which one rank left it out is in no state to go on.
      group.abort("interrupted in the middle of a call");
      {
        WithoutGil without;
        calls.wait(*ticket, Clock::time_point::max());
      }
      throw error;
    }
  }
}

// A call under way, for Python. Owns what keeps the memory of the call, until the call has ended.
class Pending {
 public:
  Pending(const Group& group, std::shared_ptr<Lane> lane, std::shared_ptr<Ticket> ticket, nb::object kept, Op op)
      : member_(group.shared_member()),
        lane_(std::move(lane)),
        ticket_(std::move(ticket)),
        kept_(std::move(kept)),
        generation_(fork_generation()),
        token_(group.token),
        op_(op) {}
  Pending(Pending&&) = default;
  ~Pending() {
    // Only where an exception came between the call's beginning and the one who was to keep this: better lost than
    // written to after it was freed.
    if (ticket_ && result() == Result::pending) kept_.release();
  }

  // In a forked child there is neither the call nor the group's memory.
  bool forked() const noexcept { return generation_ != fork_generation(); }
  Result result() const noexcept { return forked() ? Result::forked : ticket_->result(); }
  // For one who asks instead of waiting.
  Result poll() const noexcept {
    const Result found = result();
    if (found == Result::pending) lane_->hurry();
    return found;
  }
  bool notify(std::uint64_t token) const noexcept {
    if (forked() || !ticket_->notify(token)) return false;
    lane_->hurry();
    return true;
  }
  std::uint64_t seq() const noexcept { return ticket_->seq.load(std::memory_order_relaxed); }
  int source() const noexcept { return ticket_->source.load(std::memory_order_relaxed); }

  Result wait(double timeout) const {
    const auto until = timeout < 0 ? Clock::time_point::max() : after(timeout);
    LongWait watch(*member_, token_, *ticket_, op_, Clock::now());
    while (result() == Result::pending) {
      {
        const InCall in_call;
        WithoutGil without;
        lane_->wait(*ticket_, std::min({until, next_look(), watch.at()}));
      }
      if (Clock::now() >= until) break;
      watch.look(*lane_);
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    return result();
  }

  std::vector<int> missing() const { return forked() ? std::vector<int>() : lane_->missing_for(*ticket_); }

 private:
  std::shared_ptr<const Member> member_;
  std::shared_ptr<Lane> lane_;
  std::shared_ptr<Ticket> ticket_;
  nb::object kept_;
  std::uint32_t generation_;
  std::uint64_t token_;
  Op op_;
};

// Goes on with the calls in flight for a moment, for a rank that is about to leave the group.
Lane::Rest drain(Group& group) {
  // The call that a signal handler has interrupted has nobody to wait for it here.
  if (group.forked() || group.has_left() || Within::one_of(group)) return Lane::Rest::nothing;
  WithoutGil without;
  Lane::Rest rest = Lane::Rest::nothing;
  for (Lane* lane : {static_cast<Lane*>(&group.calls()), static_cast<Lane*>(&group.messages())}) {
    const Lane::Rest found = lane->drain(Clock::now() + kBetweenSignals / 2);
    if (rest != Lane::Rest::moving && found != Lane::Rest::nothing) rest = found;
  }
  return rest;
}

std::uint64_t next_completion(bool had, bool gathers) {
  // Where there are more, the GIL is kept: giving it up for each would mean to wait for it each time.
  if (const std::uint64_t token = completions().next_at_once(had)) return token;
  WithoutGil without;
  return completions().next(had, gathers);
}

}  // namespace

std::shared_ptr<CallTicket> ticket_of_thread() {
  // Used again by the next call of this thread, when nobody else holds it any more.
  thread_local std::shared_ptr<CallTicket> spare;
  if (!spare || spare.use_count() != 1) spare = std::make_shared<CallTicket>();
  std::atomic_thread_fence(std::memory_order_acquire);
  spare->reopen();
  return spare;
}

Outcome run_call(Group& group, const std::shared_ptr<CallTicket>& ticket, double timeout) {
  if (Within::one_of(group)) return {Result::nested, 0};
  const Result refused = prepare(group, *ticket, timeout, false);
  const Result result = refused != Result::finished ? refused : carry_out(group, ticket);
  return {result, ticket->seq.load(std::memory_order_relaxed)};
}

Started start_call(Group& group, std::shared_ptr<CallTicket> ticket, double timeout, nb::object kept) {
  const Result refused = prepare(group, *ticket, timeout, true);
  if (refused != Result::finished) return {refused, {}};
  const Request& request = ticket->request;
  const bool is_short =
      std::max(request.in.largest(), request.out.largest()) <= group.segment().header().tuning.one_shot_bytes;
  // Neither takes long: others do what a long call needs.
  group.calls().submit(ticket, is_short ? Handing::at_once : Handing::later);
  if (ticket->result() == Result::finished) return {Result::finished, {}};
  const Op op = request.op;
  return {Result::pending, nb::cast(Pending(group, group.calls_lane(), std::move(ticket), std::move(kept), op))};
}

Started start_message(Group& group, std::shared_ptr<MessageTicket> ticket, double timeout, nb::object kept) {
  const Description& call = ticket->call;
  if (!ticket->sends() && !writable(ticket->data)) return {Result::not_writable, {}};
  const Result refused = refusal(group);
  if (refused == Result::was_broken) group.messages().give_up_if_idle();
  if (refused != Result::finished) return {refused, {}};
  group.refusals().message_made(ticket->sends(), call.peer, call.tag);
  ticket->call.engine = Engine::shm;
  ticket->made = Clock::now();
  ticket->deadline = after(timeout, ticket->made);
  if (group.explains()) describe(group, *ticket, timeout);
  {
    WithoutGil without;
    group.messages().submit(ticket);
  }
  // Who sent it is to be asked of the one under way, also when it has come already.
  if (call.peer != kAnySource && ticket->result() == Result::finished) return {Result::finished, {}};
  const Op op = call.op;
  return {Result::pending, nb::cast(Pending(group, group.messages_lane(), std::move(ticket), std::move(kept), op))};
}

void bind_calls(nb::module_& module, nb::class_<Group>& group) {
  nb::class_<Pending>(module, "Pending", nb::is_weak_referenceable())
      .def("wait", [](const Pending& self, double timeout) { return static_cast<int>(self.wait(timeout)); })
      .def("missing", &Pending::missing)
      .def("notify", &Pending::notify)
      .def_prop_ro("result", [](const Pending& self) { return static_cast<int>(self.poll()); })
      .def_prop_ro("is_over", [](const Pending& self) { return self.result() != Result::pending; })
      .def_prop_ro("seq", &Pending::seq)
      .def_prop_ro("source", &Pending::source);
  module.def(
      "main_thread_in_call",
      [] { return main_thread_in_call.load(std::memory_order_relaxed) == fork_generation() + 1; },
      "Whether the main thread waits in a call of ours.");
  module.def("next_completion", &next_completion);
  module.def("leave_completions", [] { completions().leave(); });
  module.def("push_completion", [](std::uint64_t token) { completions().push(token); });
  module.def("close_completions", [](bool closed) { completions().set_closed(closed); });

  group.def("drain", [](Group& self) { return static_cast<int>(drain(self)); });
}

}  // namespace phalanx
