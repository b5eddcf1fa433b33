// The sums of what calls take: read at any time, whoever ends the calls.
#include <mutex>

#include "harness.hpp"

namespace stress {

namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kWriters = 3;
constexpr std::uint64_t kAdded = 2'000;
constexpr std::uint64_t kCalls = 60;
constexpr std::uint64_t kBytes = 64;

bool has_grown(const Statistics::Sum& before, const Statistics::Sum& after) {
  return before.calls <= after.calls && before.bytes <= after.bytes && before.waiting <= after.waiting &&
         before.moving <= after.moving;
}

// Reads until all has been added, and more and more of it each time. `whole(sum)`: nothing is missing of a call.
template <class Whole>
void read_until(const Statistics& statistics, Op op, std::uint64_t calls, Complaints& complaints, Whole&& whole) {
  Statistics::Sum before;
  while (before.calls < calls) {
    const Statistics::Sum sum = statistics.of(op);
    expect(complaints, has_grown(before, sum), "sums that only grow");
    expect(complaints, whole(sum), "all of a call or nothing");
    if (!complaints.empty()) return;
    before = sum;
    std::this_thread::yield();
  }
}

// Threads that take turns, as holders of a lane do.
Complaints added_in_turns(Random&) {
  Statistics statistics;
  Complaints complaints;
  std::mutex lane;
  std::vector<std::thread> writers;
  for (std::uint64_t writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&] {
      for (std::uint64_t i = 0; i < kAdded; ++i) {
        const std::lock_guard lock(lane);
        statistics.add(Op::broadcast, {1, 2, 3ns, 4ns});
      }
    });
  }
  read_until(statistics, Op::broadcast, kWriters * kAdded, complaints, [](const Statistics::Sum& sum) {
    const auto calls = static_cast<std::int64_t>(sum.calls);
    return sum.bytes == 2 * sum.calls && sum.waiting == 3 * calls * 1ns && sum.moving == 4 * calls * 1ns;
  });
  for (std::thread& writer : writers) writer.join();
  expect(complaints, statistics.of(Op::all_gather).calls == 0, "nothing of an op that was not called");
  return complaints;
}

// Calls and messages in flight: the progress thread, or the thread that hands them over, ends them.
Complaints read_beside_calls(Random& random, int size) {
  World world(size, random_tuning(random));
  const auto moved = [](const Statistics::Sum& sum) { return sum.bytes == kBytes * sum.calls; };
  return on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    GroupEnd& group = world[rank];
    const Statistics& statistics = *group.member().statistics;
    std::thread reader([&] { read_until(statistics, Op::all_reduce, kCalls, mine, moved); });
    std::vector<std::int32_t> numbers(kBytes / sizeof(std::int32_t), 1);
    std::vector<std::byte> sent(kBytes), received(kBytes * kCalls);
    const Piece piece{reinterpret_cast<std::byte*>(numbers.data()), kBytes};
    std::vector<std::shared_ptr<CallTicket>> calls;
    std::vector<std::shared_ptr<MessageTicket>> messages;
    const int next = (rank + 1) % size, last = (rank + size - 1) % size;
    for (std::uint64_t i = 0; i < kCalls; ++i) {
      calls.push_back(start_call(group, kPatience, i % 2 == 0 ? Handing::at_once : Handing::later, [&](Request& call) {
        call.op = Op::all_reduce;
        call.reduce_op = static_cast<int>(ReduceOp::max);
        call.dtype = DType::int32;
        call.count = static_cast<std::int64_t>(numbers.size());
        call.in.add_block(&piece, 1);
        call.out.add_block(&piece, 1);
      }));
      const auto message = [&](bool sends, int peer, std::byte* data) {
        messages.push_back(start_message(
            group, kPatience, {sends, peer, 7, DType::none, static_cast<std::int64_t>(kBytes), Piece{data, kBytes}}));
      };
      message(true, next, sent.data());
      message(false, last, received.data() + i * kBytes);
    }
    Complaints waiters;
    const auto finish = [&](Lane& lane, const auto& tickets) {
      for (const auto& ticket : tickets) {
        expect_result(waiters, wait_for(lane, *ticket), {Result::finished}, "a call");
      }
    };
    finish(group.calls(), calls);
    finish(group.messages(), messages);
    reader.join();
    mine.insert(mine.end(), waiters.begin(), waiters.end());
    for (const Op op : {Op::all_reduce, Op::send, Op::recv}) {
      const Statistics::Sum sum = statistics.of(op);
      expect(mine, sum.calls == kCalls && moved(sum), "every call once, when it has ended");
    }
  });
}

}  // namespace

void run_statistics_cases(Tally& tally, int size, std::uint64_t seed) {
  if (size == 1) tally.run_seeded("statistics that are added to in turns", 1, seed, 701, added_in_turns);
  tally.run_seeded("statistics that are read beside calls", size, seed, 702,
                   [&](Random& random) { return read_beside_calls(random, size); });
}

}  // namespace stress
