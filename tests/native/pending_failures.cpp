// Failures while calls and messages are under way that nobody may be waiting for, and failures of messages.
//
// Every ticket must end, by itself too.
#include <algorithm>
#include <memory>

#include "harness.hpp"
#include "payload.hpp"

namespace stress {

namespace {

constexpr std::chrono::milliseconds kShortTimeout{50};
constexpr std::uint32_t kTag = 3;
constexpr std::uint32_t kTagOfNobody = 77;  // nobody sends or receives the other side
constexpr std::size_t kShort = 40;
constexpr std::size_t kLong = 3 * kInlineBytes;

// Memory that lives as long as the calls of a rank that were given it.
class Shelf {
 public:
  Piece take(std::size_t bytes, int value) {
    kept_.push_back(std::make_unique<Bytes>(bytes, static_cast<std::byte>(value)));
    return {kept_.back()->data(), bytes};
  }

 private:
  std::vector<std::unique_ptr<Bytes>> kept_;
};

using CallPtr = std::shared_ptr<CallTicket>;
using MessagePtr = std::shared_ptr<MessageTicket>;

CallPtr start_sum(GroupEnd& group, Shelf& shelf, Handing handing, std::chrono::nanoseconds timeout = kPatience) {
  const Piece piece = shelf.take(100, 1);
  return start_call(group, timeout, handing, [&](Request& request) {
    request.op = Op::all_reduce;
    request.reduce_op = static_cast<int>(ReduceOp::sum);
    request.dtype = DType::uint8;
    request.count = static_cast<std::int64_t>(piece.size);
    request.in.add_block(&piece, 1);
    request.out.add_block(&piece, 1);
  });
}

MessagePtr start_bytes(GroupEnd& group, Shelf& shelf, bool sends, int peer, std::uint32_t tag, std::size_t bytes,
                       std::chrono::nanoseconds timeout = kPatience) {
  const Piece data = shelf.take(bytes, sends ? group.rank() + 1 : 0);
  return start_message(group, timeout, {sends, peer, tag, DType::uint8, static_cast<std::int64_t>(bytes), data});
}

bool holds(const MessageTicket& ticket, int sender) {
  const std::byte* data = ticket.data.data;
  return std::all_of(data, data + ticket.data.size,
                     [&](std::byte byte) { return byte == static_cast<std::byte>(sender + 1); });
}

// Comes to the end of a call either way: by waiting, or by leaving it to the progress thread.
Result end_of(Lane& lane, const Ticket& ticket, Random& random, Complaints& complaints) {
  if (random.one_in(2) && poll(ticket) == Result::pending) complaints.push_back("a call did not end by itself");
  return wait_for(lane, ticket);
}

Random own_random(std::uint64_t seed, int rank) { return Random(mix(seed, static_cast<std::uint64_t>(rank))); }

// A rank other than these.
int another(Random& random, int size, const std::vector<int>& ranks) {
  const std::vector<int> others = all_but(size, ranks);
  return others[random.below(others.size())];
}

// A message of other numbers than its receive expects.
Complaints misfit(int size, Random& random, bool of_dtype, bool is_long) {
  World world(size, random_tuning(random));
  const int receiver = random_rank(random, size);
  const int sender = another(random, size, {receiver});
  const int asked = random.one_in(2) ? sender : kAnySource;
  const std::int64_t count = is_long ? 700 : 7;
  const std::int64_t expected = of_dtype ? count : count + 1;
  const DType dtype = of_dtype ? DType::float32 : DType::int32;
  const std::uint64_t seed = random.next();
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    GroupEnd& group = world[rank];
    Random own = own_random(seed, rank);
    Shelf shelf;
    MessagePtr ticket;
    if (rank == sender) {
      const Piece data = shelf.take(4 * static_cast<std::size_t>(count), 1);
      ticket = start_message(group, kPatience, {true, receiver, kTag, DType::int32, count, data});
      const Result result = end_of(group.messages(), *ticket, own, mine);
      // A short one is done when it is on its way.
      expect_result(mine, result, {is_long ? Result::failed : Result::finished}, "the send that does not fit");
    } else if (rank == receiver) {
      const Piece data = shelf.take(4 * static_cast<std::size_t>(expected), 1);
      ticket = start_message(group, kPatience, {false, asked, kTag, dtype, expected, data});
      const Result result = end_of(group.messages(), *ticket, own, mine);
      expect_result(mine, result, {Result::failed}, "the receive that does not fit");
      expect(mine, holds(*ticket, 0), "the receive's memory to be as it was");
    } else {
      ticket = start_bytes(group, shelf, false, sender, kTagOfNobody, kShort);
      const Result result = end_of(group.messages(), *ticket, own, mine);
      expect_result(mine, result, {Result::failed, Result::was_broken}, "another rank's receive");
    }
    const CallPtr sum = start_sum(group, shelf, Handing::later);
    const Result next = end_of(group.calls(), *sum, own, mine);
    expect_result(mine, next, {Result::failed, Result::was_broken}, "the call after the message");
    const MessagePtr last = start_bytes(group, shelf, true, (rank + 1) % size, kTag, kShort);
    expect_result(mine, last->result(), {Result::was_broken}, "a message in a broken group");
    const Failure failure = group.failure();
    expect_failure(mine, failure, FailureKind::message, 1);
    expect(mine, failure.rank == receiver && failure.peer == sender, "both to be named");
    const Description& sent = failure.misfit.sent;
    const Description& received = failure.call;
    expect(mine, sent.op == Op::send && received.op == Op::recv, "both sides");
    expect(mine, sent.peer == receiver && received.peer == asked, "whom both had named");
    expect(mine, sent.count == count && received.count == expected, "both counts");
    expect(mine, sent.dtype == DType::int32 && received.dtype == dtype, "both dtypes");
    expect(mine, sent.tag == kTag && received.tag == kTag, "the tag");
  });
  return complaints;
}

enum class Unanswered { receive, receive_from_anybody, send, call };

// The progress thread, or whoever waits, finds that the time of a message or a call is up; all others end with it.
Complaints timeout(int size, Random& random, Unanswered what) {
  World world(size, random_tuning(random));
  const int judge = random_rank(random, size);
  const int peer = another(random, size, {judge});
  const std::uint64_t seed = random.next();
  std::atomic<int> started{0};
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    GroupEnd& group = world[rank];
    Random own = own_random(seed, rank);
    Shelf shelf;
    if (rank != judge) {
      const MessagePtr receive = start_bytes(group, shelf, false, judge, kTagOfNobody, kLong);
      const MessagePtr send = start_bytes(group, shelf, true, judge, kTagOfNobody + 1, kLong);
      started.fetch_add(1, std::memory_order_relaxed);
      for (const MessagePtr& ticket : {receive, send}) {
        expect_result(mine, end_of(group.messages(), *ticket, own, mine), {Result::failed}, "a message of a peer");
      }
      return;
    }
    wait_until(started, size - 1);
    Result result = Result::pending;
    if (what == Unanswered::call) {
      const CallPtr first = start_sum(group, shelf, Handing::later, kShortTimeout);
      const CallPtr second = start_sum(group, shelf, Handing::later);
      result = poll(*first);
      expect_result(mine, end_of(group.calls(), *second, own, mine), {Result::was_broken}, "the call behind it");
    } else {
      const bool sends = what == Unanswered::send;
      const int asked = what == Unanswered::receive_from_anybody ? kAnySource : peer;
      const MessagePtr ticket = start_bytes(group, shelf, sends, asked, kTag, kLong, kShortTimeout);
      result = end_of(group.messages(), *ticket, own, mine);
    }
    expect_result(mine, result, {Result::failed}, "what has no other side");
  });
  const Failure failure = world[peer].failure();
  expect_failure(complaints, failure, FailureKind::timeout, 1);
  const Op op = what == Unanswered::call ? Op::all_reduce : what == Unanswered::send ? Op::send : Op::recv;
  expect(complaints, failure.rank == judge && failure.call.op == op, "the rank whose time was up, and its op");
  const bool one = what == Unanswered::receive || what == Unanswered::send;
  const std::vector<int> expected = one ? std::vector<int>{peer} : all_but(size, {judge});
  expect(complaints, missing_in(failure) == expected, "who was waited for");
  return complaints;
}

// A call whose time is up before it has begun ends the group, like any other: left out, it would let those behind it
// meet the wrong calls of peers.
Complaints late_in_the_queue(int size, Random& random) {
  World world(size, random_tuning(random));
  const int early = random_rank(random, size);
  const std::uint64_t seed = random.next();
  std::atomic<int> ended{0};
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    GroupEnd& group = world[rank];
    Random own = own_random(seed, rank);
    Shelf shelf;
    if (rank != early) wait_until(ended, 1);
    const CallPtr first = start_sum(group, shelf, own.pick({Handing::at_once, Handing::later}));
    const CallPtr second = start_sum(group, shelf, own.pick({Handing::at_once, Handing::later}),
                                     rank == early ? kShortTimeout : kPatience);
    const CallPtr last = start_sum(group, shelf, Handing::later);
    if (rank == early) {
      expect_result(mine, end_of(group.calls(), *second, own, mine), {Result::failed}, "the call that is late");
      ended.fetch_add(1, std::memory_order_relaxed);
    }
    for (const CallPtr& other : {first, last, second}) {
      if (rank == early && other == second) continue;
      const Result result = end_of(group.calls(), *other, own, mine);
      expect_result(mine, result, {Result::was_broken}, "a call around the one that is late");
    }
  });
  const Failure failure = world[early].failure();
  expect(complaints, failure.kind == FailureKind::timeout && failure.rank == early && failure.seq == 2,
         "whose time was up");
  expect(complaints, missing_in(failure) == all_but(size, {early}), "who was waited for");
  return complaints;
}

// What one rank has under way: some of it will be answered, some of it never.
struct Affairs {
  Affairs(GroupEnd& group, Shelf& shelf, Random& random, int num_calls, bool answered) : group(group) {
    const int next = (group.rank() + 1) % group.size(), last = (group.rank() + group.size() - 1) % group.size();
    for (int i = 0; i < num_calls; ++i) {
      calls.push_back(start_sum(group, shelf, random.pick({Handing::at_once, Handing::later})));
      if (!answered) continue;
      const std::size_t bytes = i % 2 == 0 ? kShort : kLong;
      messages.push_back(start_bytes(group, shelf, false, last, kTag, bytes));
      messages.push_back(start_bytes(group, shelf, true, next, kTag, bytes));
    }
    unanswered.push_back(start_bytes(group, shelf, false, kAnySource, kTagOfNobody, kShort));
    unanswered.push_back(start_bytes(group, shelf, false, last, kTagOfNobody, kLong));
    unanswered.push_back(start_bytes(group, shelf, true, next, kTagOfNobody + 1, kLong));
  }

  void expect_ends(Random& random, std::initializer_list<Result> of_calls, std::initializer_list<Result> of_messages,
                   std::initializer_list<Result> of_unanswered, Complaints& complaints) {
    for (const CallPtr& ticket : calls) {
      expect_result(complaints, end_of(group.calls(), *ticket, random, complaints), of_calls, "a call");
    }
    for (const MessagePtr& ticket : messages) {
      const Result result = end_of(group.messages(), *ticket, random, complaints);
      expect_result(complaints, result, of_messages, "a message");
      if (result != Result::finished) continue;
      const int sender = ticket->sends() ? group.rank() : ticket->call.peer;
      expect(complaints, holds(*ticket, sender), "a message that finished to have the sender's bytes");
    }
    for (const MessagePtr& ticket : unanswered) {
      const Result result = end_of(group.messages(), *ticket, random, complaints);
      expect_result(complaints, result, of_unanswered, "a message without another side");
    }
  }

  GroupEnd& group;
  std::vector<CallPtr> calls;
  std::vector<MessagePtr> messages, unanswered;
};

// The abort comes at any moment, while ranks hand over, wait and poll.
Complaints abort_in_flight(int size, Random& random) {
  World world(size, random_tuning(random));
  const int aborting = random_rank(random, size);
  const std::uint64_t seed = random.next();
  std::thread aborter([&, yields = random.below(600)] {
    yield_times(yields);
    world[aborting].abort("enough");
  });
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    Random own = own_random(seed, rank);
    Shelf shelf;
    // The first rank makes fewer calls than the others.
    Affairs affairs(world[rank], shelf, own, rank == 0 ? 6 : 10, true);
    affairs.expect_ends(own, {Result::finished, Result::failed, Result::was_broken},
                        {Result::finished, Result::failed, Result::was_broken}, {Result::failed, Result::was_broken},
                        mine);
    expect(mine, world[rank].calls().idle() && world[rank].messages().idle(), "nothing to be left over");
  });
  aborter.join();
  expect(complaints, world[0].failure().kind == FailureKind::aborted, "an abort");
  return complaints;
}

// One rank goes while it has calls and messages under way, on this thread or another, by leaving or by being destroyed.
// What the others have among themselves comes to its end.
Complaints leave_in_flight(int size, Random& random, bool destroys) {
  World world(size, random_tuning(random));
  const int leaver = random_rank(random, size);
  const std::uint64_t seed = random.next();
  std::atomic<int> started{0};
  std::thread leaving([&] {
    if (destroys) return;
    wait_until(started, size);
    world[leaver].leave(Leaving::closed);
  });
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    GroupEnd& group = world[rank];
    Random own = own_random(seed, rank);
    Shelf shelf;
    if (rank == leaver) {
      Affairs affairs(group, shelf, own, 3, false);
      started.fetch_add(1, std::memory_order_relaxed);
      if (!destroys) return affairs.expect_ends(own, {Result::left}, {}, {Result::left}, mine);
      wait_until(started, size);
      world.groups[static_cast<std::size_t>(rank)].reset();
      for (const CallPtr& ticket : affairs.calls) expect_result(mine, ticket->result(), {Result::left}, "a call");
      for (const MessagePtr& ticket : affairs.unanswered) {
        expect_result(mine, ticket->result(), {Result::left}, "a message");
      }
      return;
    }
    const auto with = [&](bool sends, int peer, std::uint32_t tag, std::size_t bytes) {
      return start_bytes(group, shelf, sends, peer, tag, bytes);
    };
    std::vector<MessagePtr> among, with_leaver;
    for (const int peer : all_but(size, {rank, leaver})) {
      for (const std::size_t bytes : {kLong, kShort, 10 * kLong}) {
        among.push_back(with(true, peer, kTag, bytes));
        among.push_back(with(false, peer, kTag, bytes));
      }
    }
    with_leaver.push_back(with(false, leaver, kTag, kShort));
    with_leaver.push_back(with(true, leaver, kTag, kLong));
    started.fetch_add(1, std::memory_order_relaxed);
    for (const MessagePtr& ticket : with_leaver) {
      expect_result(mine, end_of(group.messages(), *ticket, own, mine), {Result::failed}, "a message with the leaver");
    }
    for (const MessagePtr& ticket : among) {
      expect_result(mine, end_of(group.messages(), *ticket, own, mine), {Result::finished}, "a message among others");
      expect(mine, holds(*ticket, ticket->sends() ? rank : ticket->call.peer), "the sender's bytes");
    }
    const Failure failure = group.failure();
    expect(mine, failure.kind == FailureKind::left && failure.peer == leaver, "the rank that left to be named");
  });
  leaving.join();
  return complaints;
}

// Another thread hands over while its rank leaves: what came too late ends all the same.
Complaints start_while_leaving(int size, Random& random) {
  World world(size, random_tuning(random));
  std::atomic<int> started{0};
  std::thread leaving([&, yields = random.below(100)] {
    wait_until(started, 1);
    yield_times(yields);
    world[0].leave(Leaving::closed);
  });
  Complaints complaints;
  Shelf shelf;
  std::vector<std::shared_ptr<Ticket>> tickets;
  while (!world[0].has_left()) {
    tickets.push_back(start_sum(world[0], shelf, random.pick({Handing::at_once, Handing::later})));
    if (size > 1) tickets.push_back(start_bytes(world[0], shelf, random.one_in(2), 1, kTag, kLong));
    started.store(1, std::memory_order_relaxed);
  }
  leaving.join();
  // As by a thread that looked before the rank left and hands over after it has.
  for (const Handing handing : {Handing::at_once, Handing::later}) {
    const auto late = std::make_shared<CallTicket>();
    late->deadline = Clock::now() + kPatience;
    world[0].calls().submit(late, handing);
    tickets.push_back(late);
  }
  const auto message = std::make_shared<MessageTicket>();
  message->call.peer = kAnySource;
  message->deadline = Clock::now() + kPatience;
  world[0].messages().submit(message);
  tickets.push_back(message);
  for (const auto& ticket : tickets) {
    const Result result = poll(*ticket);
    // Alone, a rank's calls end at once.
    if (size > 1 || result != Result::finished)
      expect_result(complaints, result, {Result::left}, "a call that is late");
    if (!complaints.empty()) break;
  }
  return complaints;
}

}  // namespace

void run_pending_failure_cases(Tally& tally, int size, std::uint64_t seed) {
  std::uint64_t number = 300;
  const auto run = [&](const char* name, const std::function<Complaints(Random&)>& body) {
    tally.run_seeded(name, size, seed, ++number, body);
  };
  run("start while leaving", [&](Random& random) { return start_while_leaving(size, random); });
  if (size == 1) return;
  run("misfit of short dtype", [&](Random& random) { return misfit(size, random, true, false); });
  run("misfit of long dtype", [&](Random& random) { return misfit(size, random, true, true); });
  run("misfit of short count", [&](Random& random) { return misfit(size, random, false, false); });
  run("misfit of long count", [&](Random& random) { return misfit(size, random, false, true); });
  run("timeout of a receive", [&](Random& random) { return timeout(size, random, Unanswered::receive); });
  run("timeout of a receive from anybody",
      [&](Random& random) { return timeout(size, random, Unanswered::receive_from_anybody); });
  run("timeout of a send", [&](Random& random) { return timeout(size, random, Unanswered::send); });
  run("timeout of a call nobody waits for", [&](Random& random) { return timeout(size, random, Unanswered::call); });
  run("call late in the queue", [&](Random& random) { return late_in_the_queue(size, random); });
  run("abort in flight", [&](Random& random) { return abort_in_flight(size, random); });
  run("leave in flight", [&](Random& random) { return leave_in_flight(size, random, false); });
  run("end of a group in flight", [&](Random& random) { return leave_in_flight(size, random, true); });
}

}  // namespace stress
