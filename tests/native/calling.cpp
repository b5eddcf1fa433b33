// The engine that makes calls (calling.hpp), with hooks of a test's own in place of Python's.
#include "calling.hpp"

#include <atomic>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "harness.hpp"

namespace stress {

namespace {

constexpr double kSeconds = 40.0;

struct Interrupted : std::exception {};

// Notes what the engine asks for, and that it holds the lock of the thread when it asks.
class Hooks : public CallHooks {
 public:
  void release() override { good_ = std::exchange(holds_lock_, false) && good_; }
  void take_back() noexcept override { good_ = !std::exchange(holds_lock_, true) && good_; }
  void record_call(GroupEnd&, CallTicket& ticket, double, bool is_async) override {
    ask();
    ++num_recorded;
    good_ = good_ && is_async != ticket.request.is_waited_for;
  }
  void record_call(GroupEnd&, MessageTicket&, double) override {
    ask();
    ++num_recorded;
  }
  Clock::time_point next_look() override {
    ask();
    return looks ? Clock::now() + std::chrono::milliseconds(1) : Clock::time_point::max();
  }
  void look_at_signals() override {
    ask();
    num_looks.fetch_add(1, std::memory_order_relaxed);
    if (on_look) on_look();
  }
  Clock::time_point slow_at(Clock::time_point beginning) override {
    ask();
    return is_slow_at_once ? beginning + std::chrono::milliseconds(1) : Clock::time_point::max();
  }
  void tell_long() override { ask(); }
  void tell_slow(const WaitingCall& call) override {
    ask();
    slow.push_back(call);
    num_told.fetch_add(1, std::memory_order_relaxed);
  }
  void tell_refused(const WaitingCall& call) override {
    ask();
    refused.push_back(call);
    num_told.fetch_add(1, std::memory_order_relaxed);
  }

  void check(Complaints& complaints) const {
    expect(complaints, good_ && holds_lock_, "the lock to be held where a hook is asked, and released in between");
  }

  bool looks = true;
  bool is_slow_at_once = false;
  std::function<void()> on_look;
  int num_recorded = 0;
  std::vector<WaitingCall> slow, refused;
  std::atomic<int> num_looks{0}, num_told{0};

 private:
  void ask() { good_ = holds_lock_ && good_; }
  bool holds_lock_ = true;
  bool good_ = true;
};

std::shared_ptr<CallTicket> barrier_ticket() {
  auto ticket = std::make_shared<CallTicket>();
  ticket->request.op = Op::barrier;
  return ticket;
}

Outcome run_barrier(GroupEnd& group, Hooks& hooks, double timeout = kSeconds) {
  return phalanx::run_call(group, barrier_ticket(), timeout, hooks);
}

// A signal handler, which runs in the middle of a call, makes a call in the same group, and one in another.
Complaints nested_calls(Random& random) {
  World world(2, random_tuning(random)), alone(1, random_tuning(random));
  std::atomic<int> looked{0};
  return on_ranks(all_ranks(2), [&](int rank, Complaints& mine) {
    Hooks hooks;
    if (rank == 1) {
      wait_until(looked, 1);
      expect_result(mine, run_barrier(world[1], hooks).result, {Result::finished}, "the call of the peer");
      return;
    }
    hooks.on_look = [&] {
      Hooks inner;
      const Outcome nested = run_barrier(world[0], inner);
      expect_result(mine, nested.result, {Result::nested}, "a call within one of the same group");
      expect(mine, nested.seq == 0 && inner.num_recorded == 0, "a nested call not to be handed over");
      expect(mine, drain(world[0], inner) == Lane::Rest::nothing, "nothing to drain within a call");
      expect_result(mine, run_barrier(alone[0], inner).result, {Result::finished}, "a call of another group");
      inner.check(mine);
      looked.store(1, std::memory_order_relaxed);
    };
    const Outcome outcome = run_barrier(world[0], hooks);
    expect_result(mine, outcome.result, {Result::finished}, "the call that was interrupted for a moment");
    expect(mine, outcome.seq == 1 && hooks.num_recorded == 1, "one call to be recorded");
    expect_result(mine, run_barrier(alone[0], hooks).result, {Result::finished}, "a call after it");
    hooks.check(mine);
  });
}

// A wait takes long: that is told once, with the rank that is absent, however long it takes then.
Complaints long_wait(Random& random, bool in_flight) {
  World world(3, random_tuning(random));
  world[0].token = 17;
  std::atomic<int> may_come{0};
  return on_ranks(all_ranks(3), [&](int rank, Complaints& mine) {
    Hooks hooks;
    if (rank == 2) wait_until(may_come, 1);
    if (rank != 0) {
      expect_result(mine, run_barrier(world[rank], hooks).result, {Result::finished}, "the call of a peer");
      expect(mine, hooks.num_told == 0, "no wait to be told that is not slow");
      return;
    }
    hooks.is_slow_at_once = true;
    int looks_when_told = 0;
    hooks.on_look = [&] {
      if (hooks.num_told == 1 && looks_when_told == 0) looks_when_told = hooks.num_looks;
      if (looks_when_told > 0 && hooks.num_looks > looks_when_told + 5) may_come.store(1, std::memory_order_relaxed);
    };
    if (in_flight) {
      const auto ticket = barrier_ticket();
      expect_result(mine, phalanx::start_call(world[0], ticket, kSeconds, hooks), {Result::pending}, "a call");
      expect_result(mine, CallInFlight(world[0], ticket).wait(-1, hooks), {Result::finished}, "a slow call");
    } else {
      expect_result(mine, run_barrier(world[0], hooks).result, {Result::finished}, "a slow call");
    }
    expect(mine, hooks.slow.size() == 1 && hooks.refused.empty(), "a slow wait to be told once");
    for (const WaitingCall& call : hooks.slow) {
      expect(mine, call.group == 17 && call.op == Op::barrier && call.seq == 1, "which call is slow");
      // Rank 1 may come later than the call is told.
      expect(mine, !call.missing.empty() && call.missing.back() == 2, "who is absent");
    }
    hooks.check(mine);
  });
}

// A peer has refused the call: that is told while the call waits, and a message has its tag.
Complaints refused_peer(Random& random, bool is_message) {
  World world(2, random_tuning(random));
  std::byte data[8] = {};
  std::atomic<int> may_come{0};
  const auto ticket_of = [&](bool sends, std::byte* memory) {
    auto ticket = std::make_shared<MessageTicket>();
    ticket->call.op = sends ? Op::send : Op::recv;
    ticket->call.peer = sends ? 0 : 1;
    ticket->call.tag = 5;
    ticket->call.dtype = DType::uint8;
    ticket->call.count = 8;
    ticket->data = {memory, 8};
    return ticket;
  };
  world[1].refusals().refuse_message(true, 0, 5, "no such tensor");
  return on_ranks(all_ranks(2), [&](int rank, Complaints& mine) {
    Hooks hooks;
    std::byte sent[8] = {};
    if (rank == 1) {
      wait_until(may_come, 1);
      Result result = Result::pending;
      if (is_message) {
        const auto ticket = ticket_of(true, sent);
        result = phalanx::start_message(world[1], ticket, kSeconds, hooks);
        // The progress thread may hold the lane just then: it goes on with the send.
        if (result == Result::pending) result = CallInFlight(world[1], ticket).wait(-1, hooks);
      } else {
        result = run_barrier(world[1], hooks).result;
      }
      expect_result(mine, result, {Result::finished}, "the call of the peer");
      return;
    }
    hooks.looks = false;  // a thread that has no signals to look at comes back to tell, too
    hooks.on_look = [&] {
      if (hooks.num_told > 0) may_come.store(1, std::memory_order_relaxed);
    };
    if (is_message) {
      const auto ticket = ticket_of(false, data);
      expect_result(mine, phalanx::start_message(world[0], ticket, kSeconds, hooks), {Result::pending}, "a receive");
      expect_result(mine, CallInFlight(world[0], ticket).wait(-1, hooks), {Result::finished}, "a receive");
    } else {
      expect_result(mine, run_barrier(world[0], hooks).result, {Result::finished}, "a call");
    }
    expect(mine, !hooks.refused.empty() && hooks.slow.empty(), "a refusal to be told");
    for (const WaitingCall& call : hooks.refused) {
      expect(mine, call.tag == (is_message ? 5u : 0u), "the tag of a message");
      expect(mine, call.missing == std::vector<int>{1}, "who is absent");
    }
    hooks.check(mine);
  });
}

void wait_until_broken(const GroupEnd& group) {
  while (!group.broken()) std::this_thread::yield();
}

// The program is interrupted in a call: the group is of no more use, and all ranks hear why.
Complaints interrupted_call(Random& random) {
  World world(3, random_tuning(random));
  return on_ranks(all_ranks(3), [&](int rank, Complaints& mine) {
    Hooks hooks;
    if (rank == 2) {
      wait_until_broken(world[2]);
      for (int i = 0; i < 2; ++i) {
        const Outcome outcome = run_barrier(world[2], hooks);
        expect_result(mine, outcome.result, {Result::was_broken}, "a call on the broken group");
        expect(mine, outcome.seq == 0, "a refused call to have no seq");
      }
      expect(mine, hooks.num_recorded == 1, "the first call that came too late to be recorded, and no other");
      return;
    }
    if (rank == 1) {
      const Result result = run_barrier(world[1], hooks).result;
      expect_result(mine, result, {Result::failed, Result::was_broken}, "the call of a peer");
      return;
    }
    hooks.on_look = [] { throw Interrupted(); };
    const auto ticket = barrier_ticket();
    bool was_thrown = false;
    try {
      phalanx::run_call(world[0], ticket, kSeconds, hooks);
    } catch (const Interrupted&) {
      was_thrown = true;
    }
    expect(mine, was_thrown && hooks.num_looks == 1, "the wait to end with what the hook has thrown");
    expect(mine, !ticket->pending(), "nothing to use the memory of the call any more");
    expect_failure(mine, world[0].failure(), FailureKind::aborted, 1);
    expect(mine, world[0].failure().rank == 0, "the interrupted rank to be named");
    // Not within a call any more.
    expect_result(mine, run_barrier(world[0], hooks).result, {Result::was_broken}, "a call after it");
    hooks.check(mine);
  });
}

// The program is interrupted while it waits for a call in flight: the wait ends, and the call goes on.
Complaints interrupted_wait(Random& random) {
  World world(2, random_tuning(random));
  std::atomic<int> may_come{0};
  return on_ranks(all_ranks(2), [&](int rank, Complaints& mine) {
    Hooks hooks;
    if (rank == 1) {
      wait_until(may_come, 1);
      expect_result(mine, run_barrier(world[1], hooks).result, {Result::finished}, "the call of the peer");
      return;
    }
    hooks.on_look = [] { throw Interrupted(); };
    const auto ticket = barrier_ticket();
    expect_result(mine, phalanx::start_call(world[0], ticket, kSeconds, hooks), {Result::pending}, "a call");
    const CallInFlight call(world[0], ticket);
    bool was_thrown = false;
    try {
      call.wait(-1, hooks);
    } catch (const Interrupted&) {
      was_thrown = true;
    }
    expect(mine, was_thrown && call.result() == Result::pending && !world[0].broken(), "the call to go on");
    expect_result(mine, call.wait(0.001, hooks), {Result::pending}, "a wait that is not long enough");
    expect(mine, call.missing() == std::vector<int>{1}, "who is absent");
    may_come.store(1, std::memory_order_relaxed);
    // Nobody waits: the progress thread ends it.
    while (call.poll() == Result::pending) std::this_thread::yield();
    expect_result(mine, call.result(), {Result::finished}, "the call");
    hooks.check(mine);
  });
}

// A rank that leaves goes on with its calls in flight, and hears whether it is worth while.
Complaints draining(Random& random) {
  World world(2, random_tuning(random));
  std::atomic<int> may_come{0};
  return on_ranks(all_ranks(2), [&](int rank, Complaints& mine) {
    Hooks hooks;
    const auto ticket = barrier_ticket();
    if (rank == 1) wait_until(may_come, 1);
    expect(mine, drain(world[rank], hooks) == Lane::Rest::nothing, "nothing to drain before a call");
    const Result started = phalanx::start_call(world[rank], ticket, kSeconds, hooks);
    expect_result(mine, started, {Result::pending, Result::finished}, "a call");
    if (rank == 0) {
      expect(mine, drain(world[0], hooks) == Lane::Rest::waiting, "a call to wait for its peer");
      may_come.store(1, std::memory_order_relaxed);
    }
    while (drain(world[rank], hooks) != Lane::Rest::nothing) {
    }
    expect_result(mine, ticket->result(), {Result::finished}, "a call that was drained");
    world[rank].leave(Leaving::closed);
    expect(mine, drain(world[rank], hooks) == Lane::Rest::nothing, "nothing to drain after leaving");
    expect_result(mine, run_barrier(world[rank], hooks).result, {Result::left}, "a call after leaving");
    hooks.check(mine);
  });
}

// Timeouts in seconds, of any size.
Complaints deadlines(Random& random) {
  Complaints complaints;
  Hooks hooks;
  World alone(1, random_tuning(random));
  for (const double timeout : {0.5, 1e300, std::numeric_limits<double>::infinity()}) {
    expect_result(complaints, run_barrier(alone[0], hooks, timeout).result, {Result::finished}, "a call");
  }
  for (const double timeout : {0.2, 0.0, -1.0}) {
    World world(2, random_tuning(random));
    const auto before = Clock::now();
    expect_result(complaints, run_barrier(world[0], hooks, timeout).result, {Result::failed}, "a call without a peer");
    expect(complaints, Clock::now() - before >= std::chrono::duration<double>(timeout), "the whole timeout");
    expect_failure(complaints, world[0].failure(), FailureKind::timeout, 1);
    expect(complaints, missing_in(world[0].failure()) == std::vector<int>{1}, "who is absent");
  }
  hooks.check(complaints);
  return complaints;
}

}  // namespace

void run_calling_cases(Tally& tally, std::uint64_t seed) {
  std::uint64_t number = 500;
  const auto run = [&](const char* name, const std::function<Complaints(Random&)>& body) {
    tally.run_seeded(name, 3, seed, ++number, body);
  };
  run("nested calls", nested_calls);
  run("a long wait", [](Random& random) { return long_wait(random, false); });
  run("a long wait for a call in flight", [](Random& random) { return long_wait(random, true); });
  run("a peer that refused the call", [](Random& random) { return refused_peer(random, false); });
  run("a peer that refused the message", [](Random& random) { return refused_peer(random, true); });
  run("an interrupted call", interrupted_call);
  run("an interrupted wait", interrupted_wait);
  run("draining", draining);
  run("deadlines", deadlines);
}

}  // namespace stress
