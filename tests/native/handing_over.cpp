// What the thread that hands over a call does, and what other threads can ask while one of them holds the lane.
//
// The lanes are made without groups, so the progress thread does not know them: a lane advances only in the threads of
// a case.
#include <numeric>
#include <utility>

#include "harness.hpp"
#include "payload.hpp"

namespace stress {

namespace {

constexpr std::size_t kLong = 50'000;

Tuning small_chunks() {
  Tuning tuning = tuning_for(2, 2);
  tuning.slot_bytes = std::max<std::uint64_t>(1024, smallest_slot(2));
  tuning.chunk_bytes = tuning.slot_bytes;
  tuning.one_shot_bytes = 256;
  tuning.message_chunk_bytes = 1024;
  return tuning;
}

std::shared_ptr<CallTicket> sum_over(std::vector<std::int32_t>& numbers) {
  auto ticket = std::make_shared<CallTicket>();
  const Piece piece{reinterpret_cast<std::byte*>(numbers.data()), numbers.size() * sizeof(numbers[0])};
  ticket->request.op = Op::all_reduce;
  ticket->request.reduce_op = static_cast<int>(ReduceOp::sum);
  ticket->request.dtype = DType::int32;
  ticket->request.count = static_cast<std::int64_t>(numbers.size());
  ticket->request.in.add_block(&piece, 1);
  ticket->request.out.add_block(&piece, 1);
  ticket->deadline = Clock::now() + kPatience;
  return ticket;
}

// Two ranks that have a long call and a short one.
struct TwoCalls {
  explicit TwoCalls(const std::shared_ptr<Segment>& segment, int rank)
      : member(std::make_shared<Member>(segment, rank)), calls(member) {}
  std::shared_ptr<Member> member;
  CallQueue calls;
  std::vector<std::int32_t> many = std::vector<std::int32_t>(kLong, 1), few = std::vector<std::int32_t>(3, 1);
  std::shared_ptr<CallTicket> long_call = sum_over(many), short_call = sum_over(few);

  void finish(Complaints& complaints) {
    for (const auto& ticket : {long_call, short_call}) {
      expect_result(complaints, wait_for(calls, *ticket), {Result::finished}, "a sum");
    }
    const auto total = std::accumulate(many.begin(), many.end(), 0) + std::accumulate(few.begin(), few.end(), 0);
    expect(complaints, total == 2 * static_cast<int>(kLong + 3), "the sum over ranks");
  }
};

// A short call behind a long one: its caller does nothing for the long one.
Complaints behind_a_long_call(Random&) {
  const auto segment = make_segment(2, small_chunks());
  const auto num_staged = [&](int rank) { return segment->control(segment->seat_of(rank)).counters[0].load(); };
  TwoCalls first(segment, 0), second(segment, 1);
  Complaints complaints;
  first.calls.submit(first.long_call, Handing::later);
  first.calls.submit(first.short_call, Handing::at_once);
  expect(complaints, num_staged(0) == 0, "no step of the long call by the caller of the short one");
  expect(complaints, first.short_call->pending(), "the short call to wait for its turn");
  std::thread peer([&] {
    Complaints theirs;
    second.calls.submit(second.long_call, Handing::later);
    second.calls.submit(second.short_call, Handing::at_once);
    second.finish(theirs);
  });
  first.finish(complaints);
  peer.join();
  return complaints;
}

// A short call that nothing is before: its caller does this rank's part at once.
Complaints behind_nothing(Random&) {
  const auto segment = make_segment(2, small_chunks());
  TwoCalls first(segment, 0), second(segment, 1);
  Complaints complaints;
  first.calls.submit(first.short_call, Handing::at_once);
  expect(complaints, segment->control(segment->seat_of(0)).counters[0].load() == 1,
         "a short call to begin when it is handed over");
  second.calls.submit(second.short_call, Handing::at_once);
  expect_result(complaints, second.short_call->result(), {Result::finished}, "the last rank's call");
  expect_result(complaints, wait_for(first.calls, *first.short_call), {Result::finished}, "the first rank's call");
  return complaints;
}

std::shared_ptr<MessageTicket> message_of(bool sends, int peer, std::uint32_t tag, Bytes& data) {
  auto ticket = std::make_shared<MessageTicket>();
  ticket->call.op = sends ? Op::send : Op::recv;
  ticket->call.peer = peer;
  ticket->call.tag = tag;
  ticket->call.dtype = DType::uint8;
  ticket->call.count = static_cast<std::int64_t>(data.size());
  ticket->data = {data.data(), data.size()};
  ticket->deadline = Clock::now() + kPatience;
  return ticket;
}

// A short message behind a long one that the receiver has asked for: its sender moves nothing of the long one.
Complaints behind_a_long_message(Random&) {
  const auto segment = make_segment(2, small_chunks());
  Messages sender(std::make_shared<Member>(segment, 0)), receiver(std::make_shared<Member>(segment, 1));
  Bytes from(kLong, std::byte{7}), to(kLong), short_from(8, std::byte{3}), short_to(8);
  const auto send = message_of(true, 1, 0, from), receive = message_of(false, 0, 0, to);
  const auto short_send = message_of(true, 1, 1, short_from), short_receive = message_of(false, 0, 1, short_to);
  const ChannelLines& lines = segment->channel_lines(segment->seat_of(0), segment->seat_of(1));
  Complaints complaints;
  sender.submit(send);
  receiver.submit(receive);
  expect(complaints, lines.receiver.granted.load() == 1, "the long message to be asked for");
  sender.submit(short_send);
  expect(complaints, lines.sender.staged.load() == 0, "no chunk of the long message by the sender of the short one");
  expect_result(complaints, short_send->result(), {Result::finished}, "the short message");
  std::thread peer([&] {
    receiver.submit(short_receive);
    wait_for(receiver, *short_receive);
    wait_for(receiver, *receive);
  });
  wait_for(sender, *send);
  peer.join();
  expect(complaints, to == from && short_to == short_from, "what was sent");
  return complaints;
}

// A lane that says when a thread that holds it waits for peers.
class WatchedQueue : public CallQueue {
 public:
  using CallQueue::CallQueue;
  std::atomic<int> num_waits{0};

 protected:
  News wait_for_news(Clock::time_point until) override {
    num_waits.fetch_add(1, std::memory_order_relaxed);
    return CallQueue::wait_for_news(until);
  }
};

// A thread waits in the lane, and another one asks who is missing.
Complaints missing_while_one_waits(Random&) {
  const auto segment = make_segment(3, small_chunks());
  WatchedQueue calls(std::make_shared<Member>(segment, 0));
  CallQueue others[] = {CallQueue(std::make_shared<Member>(segment, 1)),
                        CallQueue(std::make_shared<Member>(segment, 2))};
  std::vector<std::int32_t> numbers[3][2];
  std::shared_ptr<CallTicket> tickets[3][2];
  for (int rank = 0; rank < 3; ++rank) {
    for (int i = 0; i < 2; ++i) {
      numbers[rank][i].assign(3, 1);
      tickets[rank][i] = sum_over(numbers[rank][i]);
    }
  }
  Complaints complaints;
  others[0].submit(tickets[1][0], Handing::at_once);
  for (const auto& ticket : tickets[0]) calls.submit(ticket, Handing::later);
  std::thread waiter([&] {
    for (const auto& ticket : tickets[0]) calls.wait(*ticket, Clock::time_point::max());
  });
  wait_until(calls.num_waits, 1);
  const std::vector<int> expected{2};
  expect(complaints, calls.missing_for(*tickets[0][0]) == expected, "the missing rank of the call that is waited for");
  expect(complaints, calls.missing_for(*tickets[0][1]) == expected, "the missing rank of the call behind it");
  others[0].submit(tickets[1][1], Handing::at_once);
  std::thread peer([&] { wait_for(others[0], *tickets[1][1]); });
  for (const auto& ticket : tickets[2]) others[1].submit(ticket, Handing::at_once);
  wait_for(others[1], *tickets[2][1]);
  waiter.join();
  peer.join();
  for (const auto& ticket : tickets[0]) {
    expect_result(complaints, ticket->result(), {Result::finished}, "a sum");
    expect(complaints, calls.missing_for(*ticket).empty(), "nobody to be missing for a call that has ended");
  }
  return complaints;
}

}  // namespace

void run_handing_over_cases(Tally& tally, std::uint64_t seed) {
  std::uint64_t number = 500;
  const auto run = [&](const char* name, int size, const std::function<Complaints(Random&)>& body) {
    tally.run_seeded(name, size, seed, ++number, body);
  };
  run("behind a long call", 2, behind_a_long_call);
  run("behind nothing", 2, behind_nothing);
  run("behind a long message", 2, behind_a_long_message);
  run("missing while one waits", 3, missing_while_one_waits);
}

}  // namespace stress
