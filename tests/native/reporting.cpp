// A rank that has found a failure, and waits with its report, waits in no function: its calls in other groups go on.
//
// All ranks of a case are advanced by one thread, with times of the case's own. What waited for real would wait for
// ever, or publish before its time.
#include "harness.hpp"

namespace stress {

namespace {

constexpr std::size_t kNumbers = 3;
// Far ahead of the clock, at which a thread that hands over a message looks, too.
constexpr Clock::time_point kStart{std::chrono::hours(1'000'000)};

// A rank's calls and messages in one group, which nobody but the case advances.
struct Driven {
  struct Calls : CallQueue {
    using CallQueue::advance;
    using CallQueue::CallQueue;
  };
  struct Letters : Messages {
    using Messages::advance;
    using Messages::Messages;
  };
  Driven(const std::shared_ptr<Segment>& segment, int rank)
      : member(std::make_shared<Member>(segment, rank)), calls(member), messages(member) {}

  std::shared_ptr<CallTicket> call(Op op) {
    auto ticket = std::make_shared<CallTicket>();
    ticket->made = kStart;
    ticket->request.op = op;
    ticket->request.location = &place_of(member->rank());
    if (op == Op::broadcast) {
      const Piece piece{reinterpret_cast<std::byte*>(numbers.data()), kNumbers * sizeof(numbers[0])};
      ticket->request.root = 0;
      ticket->request.dtype = DType::int32;
      ticket->request.count = kNumbers;
      ticket->request.out.add_block(&piece, 1);
    }
    if (op == Op::all_reduce) {
      const Piece piece{reinterpret_cast<std::byte*>(numbers.data()), kNumbers * sizeof(numbers[0])};
      ticket->request.reduce_op = static_cast<int>(ReduceOp::sum);
      ticket->request.dtype = DType::int32;
      ticket->request.count = kNumbers;
      ticket->request.in.add_block(&piece, 1);
      ticket->request.out.add_block(&piece, 1);
    }
    calls.submit(ticket, Handing::waited_for);
    return ticket;
  }

  std::shared_ptr<Member> member;
  Calls calls;
  Letters messages;
  std::vector<std::int32_t> numbers = std::vector<std::int32_t>(kNumbers, 1);
};

struct Group3 {
  explicit Group3(Random& random)
      : segment(make_segment(3, random_tuning(random))), first(segment, 0), second(segment, 1), third(segment, 2) {}
  std::shared_ptr<Segment> segment;
  Driven first, second, third;
};

// Two ranks disagree, which the receiver of a broadcast finds although the third has not come. The report waits for it;
// a call of another group goes on meanwhile.
Complaints mismatch_beside_another_group(Random& random) {
  Group3 broken(random), other(random);
  Complaints complaints;
  const auto odd = broken.first.call(Op::barrier), finder = broken.second.call(Op::broadcast);
  broken.first.calls.advance(kStart);
  broken.second.calls.advance(kStart);
  const auto failed = [&] { return broken.second.member->lines.failed(); };
  expect(complaints, !failed(), "the report to wait for the third rank");

  Driven* const ranks[] = {&other.first, &other.second, &other.third};
  std::vector<std::shared_ptr<CallTicket>> sums;
  for (Driven* rank : ranks) sums.push_back(rank->call(Op::all_reduce));
  for (int turn = 0; turn < 3; ++turn) {
    for (Driven* rank : ranks) rank->calls.advance(kStart);
  }
  for (const auto& sum : sums) expect_result(complaints, sum->result(), {Result::finished}, "a call of another group");
  expect(complaints, other.first.numbers.front() == 3, "the sum of another group");

  constexpr std::chrono::milliseconds kJustBefore{1};
  broken.second.calls.advance(kStart + kMismatchGrace - kJustBefore);
  expect(complaints, !failed() && finder->pending(), "the report to wait as long as it may");
  broken.second.calls.advance(kStart + kMismatchGrace);
  expect(complaints, failed(), "the report to come when its time is up");
  expect_result(complaints, finder->result(), {Result::failed}, "the call that does not match");
  expect(complaints, odd->pending(), "the other rank to be told when it looks");
  return complaints;
}

// The third rank comes while the report waits for it.
Complaints mismatch_that_all_come_to(Random& random) {
  Group3 group(random);
  Complaints complaints;
  group.first.call(Op::barrier);
  const auto finder = group.second.call(Op::broadcast);
  group.first.calls.advance(kStart);
  group.second.calls.advance(kStart);
  expect(complaints, !group.second.member->lines.failed(), "the report to wait for the third rank");
  group.third.call(Op::all_reduce);
  group.third.calls.advance(kStart);
  group.second.calls.advance(kStart);
  const Lines& lines = group.second.member->lines;
  expect_failure(complaints, lines.failure(), FailureKind::mismatch, 1);
  for (int rank = 0; rank < 3; ++rank) {
    expect(complaints, group.segment->testimony(lines.report(), group.segment->seat_of(rank)).call.seq == 1,
           "the testimony of every rank");
  }
  expect_result(complaints, finder->result(), {Result::failed}, "the call that does not match");
  return complaints;
}

// Another rank has claimed the report and is held up. This one takes over when its time is up, and not before.
template <class Start, class Advance>
Complaints held_up(Random& random, FailureKind kind, Start&& start_call, Advance&& advance) {
  constexpr std::chrono::milliseconds kTakeOver{100}, kJustBefore{1};
  Group3 group(random);
  Complaints complaints;
  group.segment->header().report_state.store(ReportState::claimed(0, 0).word());
  const auto ticket = start_call(group);
  advance(group, kStart);
  const auto failed = [&] { return group.second.member->lines.failed(); };
  expect(complaints, !failed() && ticket->pending(), "this rank to wait for the one that reports");
  advance(group, kStart + kTakeOver - kJustBefore);
  expect(complaints, !failed() && ticket->pending(), "this rank to wait as long as the other may take");
  advance(group, kStart + kTakeOver);
  expect_result(complaints, ticket->result(), {Result::failed}, "the call of the rank that takes over");
  expect(complaints, group.second.member->lines.failure().kind == kind, "what this rank has found itself");
  return complaints;
}

Complaints held_up_call(Random& random) {
  return held_up(
      random, FailureKind::mismatch,
      [](Group3& group) {
        group.first.call(Op::barrier);
        group.third.call(Op::all_reduce);
        return group.second.call(Op::all_reduce);
      },
      [](Group3& group, Clock::time_point now) {
        group.first.calls.advance(now);
        group.third.calls.advance(now);
        group.second.calls.advance(now);
      });
}

Complaints held_up_message(Random& random) {
  const auto message = [](Driven& rank, Op op, int peer, std::int64_t count) {
    auto ticket = std::make_shared<MessageTicket>();
    ticket->made = kStart;
    ticket->call.op = op;
    ticket->call.peer = peer;
    ticket->call.dtype = DType::int32;
    ticket->call.count = count;
    ticket->location = &place_of(rank.member->rank());
    ticket->data = {reinterpret_cast<std::byte*>(rank.numbers.data()), static_cast<std::uint64_t>(count) * 4};
    rank.messages.submit(ticket);
    return ticket;
  };
  return held_up(
      random, FailureKind::message,
      [&](Group3& group) {
        message(group.third, Op::send, 1, 2);
        return message(group.second, Op::recv, 2, 3);
      },
      [](Group3& group, Clock::time_point now) { group.second.messages.advance(now); });
}

}  // namespace

void run_reporting_cases(Tally& tally, std::uint64_t seed) {
  tally.run_seeded("a mismatch beside another group", 3, seed, 1, mismatch_beside_another_group);
  tally.run_seeded("a mismatch that all come to", 3, seed, 2, mismatch_that_all_come_to);
  tally.run_seeded("a call whose report is held up", 3, seed, 3, held_up_call);
  tally.run_seeded("a message whose report is held up", 3, seed, 4, held_up_message);
}

}  // namespace stress
