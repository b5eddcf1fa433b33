#include "bind_calls.hpp"

#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>

#include "bind_debug.hpp"
#include "bind_records.hpp"
#include "bind_waits.hpp"
#include "completions.hpp"
#include "gil.hpp"
#include "main_thread.hpp"

namespace nb = nanobind;

namespace phalanx {

ReduceFn kernel_of(int dtype, int op) {
  if (dtype < 0 || dtype >= static_cast<int>(kNumReducible) || op < 0 || op >= static_cast<int>(kNumReduceOps))
    return nullptr;
  return reduce_kernel(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
}

namespace {

// For one call, or one wait, of a thread that holds the GIL.
class PythonHooks final : public CallHooks {
 public:
  void release() override { without_.emplace(); }
  void take_back() noexcept override { without_.reset(); }
  void record_call(GroupEnd& group, CallTicket& ticket, double timeout, bool is_async) override {
    phalanx::record_call(group, ticket, timeout, is_async);
  }
  void record_call(GroupEnd& group, MessageTicket& ticket, double timeout) override {
    phalanx::record_call(group, ticket, timeout);
  }
  // Only the main thread runs signal handlers.
  Clock::time_point next_look() override {
    return on_main_thread() ? Clock::now() + kBetweenSignals : Clock::time_point::max();
  }
  void look_at_signals() override {
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  Clock::time_point slow_at(Clock::time_point beginning) override { return phalanx::slow_at(beginning); }
  void tell_long() override { phalanx::tell_long(); }
  void tell_slow(const WaitingCall& call) override { phalanx::tell_slow(call); }
  void tell_refused(const WaitingCall& call) override { phalanx::tell_refused(call); }

 private:
  std::optional<WithoutGil> without_;
};

// A call in flight, for Python. Owns what keeps the memory of the call, until the call has ended.
class CallHandle {
 public:
  CallHandle(CallInFlight call, nb::object kept) : call_(std::move(call)), kept_(std::move(kept)) {}
  CallHandle(CallHandle&&) = default;
  ~CallHandle() {
    // Only where an exception came between the call's beginning and the one who was to keep this: better lost than
    // written to after it was freed.
    if (call_ && call_.result() == Result::pending) kept_.release();
  }

  const CallInFlight& call() const noexcept { return call_; }
  int wait(double timeout) const {
    PythonHooks hooks;
    return static_cast<int>(call_.wait(timeout, hooks));
  }

 private:
  CallInFlight call_;
  nb::object kept_;
};

template <class Ticket>
Started started(GroupEnd& group, Result result, std::shared_ptr<Ticket> ticket, nb::object kept) {
  if (result != Result::pending) return {result, {}};
  return {result, nb::cast(CallHandle(CallInFlight(group, std::move(ticket)), std::move(kept)))};
}

std::uint64_t next_completion(bool had, bool gathers) {
  // Where there are more, the GIL is kept: giving it up for each would mean to wait for it each time.
  if (const std::uint64_t token = completions().next_at_once(had)) return token;
  WithoutGil without;
  return completions().next(had, gathers);
}

int drain_group(GroupEnd& group) {
  PythonHooks hooks;
  return static_cast<int>(drain(group, hooks));
}

}  // namespace

Outcome run_call(GroupEnd& group, const std::shared_ptr<CallTicket>& ticket, double timeout) {
  PythonHooks hooks;
  return run_call(group, ticket, timeout, hooks);
}

Started start_call(GroupEnd& group, std::shared_ptr<CallTicket> ticket, double timeout, nb::object kept) {
  PythonHooks hooks;
  const Result result = start_call(group, ticket, timeout, hooks);
  return started(group, result, std::move(ticket), std::move(kept));
}

Started start_message(GroupEnd& group, std::shared_ptr<MessageTicket> ticket, double timeout, nb::object kept) {
  PythonHooks hooks;
  const Result result = start_message(group, ticket, timeout, hooks);
  return started(group, result, std::move(ticket), std::move(kept));
}

void bind_calls(nb::module_& module, nb::class_<GroupEnd>& group) {
  nb::class_<CallHandle>(module, "CallHandle", nb::is_weak_referenceable())
      .def("wait", &CallHandle::wait)
      .def("missing", [](const CallHandle& self) { return self.call().missing(); })
      .def("notify", [](const CallHandle& self, std::uint64_t token) { return self.call().notify(token); })
      .def(
          "poll", [](const CallHandle& self) { return static_cast<int>(self.call().poll()); },
          "The result so far, for one who asks instead of waiting: wakes the progress thread while it is pending.")
      .def_prop_ro("result", [](const CallHandle& self) { return static_cast<int>(self.call().result()); })
      .def_prop_ro("is_over", [](const CallHandle& self) { return self.call().result() != Result::pending; })
      .def_prop_ro("seq", [](const CallHandle& self) { return self.call().seq(); })
      .def_prop_ro("source", [](const CallHandle& self) { return self.call().source(); });
  module.def(
      "main_thread_in_call", [] { return InCall::is_main_thread_waiting(); },
      "Whether the main thread waits in a call of ours.");
  module.def("next_completion", &next_completion);
  module.def("leave_completions", [] { completions().leave(); });
  module.def("push_completion", [](std::uint64_t token) { completions().push(token); });
  module.def("close_completions", [](bool closed) { completions().set_closed(closed); });

  group.def("drain", &drain_group);
}

}  // namespace phalanx
