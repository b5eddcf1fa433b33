// Every way in which a call can fail, each in a world of its own, and calls of one rank from several threads.
//
// Where a case needs ranks to be somewhere (all have arrived, say) it reads their counters; nothing depends on time but
// the one timeout that is meant to expire.
#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "harness.hpp"

namespace stress {

namespace {

constexpr std::chrono::milliseconds kShortTimeout{50};
constexpr std::uint64_t kSomeElements = 33;

// A call as far as its signature goes; what it moves does not matter here.
struct Shape {
  Op op = Op::barrier;
  int root = -1;
  DType dtype = DType::int32;
  int reduce_op = -1;
  std::uint64_t count = kSomeElements;
  std::uint32_t layout = 0;
};

const Shape kBarrierCall{};
const Shape kSum{Op::all_reduce, -1, DType::int32, static_cast<int>(ReduceOp::sum)};

Result run_shape(GroupEnd& group, const Shape& shape, std::chrono::nanoseconds timeout = kPatience) {
  const std::uint64_t bytes = shape.count * element_size(shape.dtype);
  const auto size = static_cast<std::size_t>(group.size());
  std::vector<std::byte> from(bytes * size), to(bytes * size);
  const Piece one_in{from.data(), bytes}, one_out{to.data(), bytes}, all_in{from.data(), bytes * size},
      all_out{to.data(), bytes * size};
  const bool is_root = shape.root == group.rank();
  return run_call(group, timeout, kBetweenLooks, [&](Request& request) {
    request.op = shape.op;
    request.reduce_op = shape.reduce_op;
    request.root = shape.root;
    request.dtype = shape.dtype;
    request.count = static_cast<std::int64_t>(shape.count);
    request.layout = shape.layout;
    request.in.clear();
    request.out.clear();
    switch (shape.op) {
      case Op::barrier:
        break;
      case Op::broadcast:
        (is_root ? request.in : request.out).add_block(is_root ? &one_in : &one_out, 1);
        break;
      case Op::reduce_scatter:
      case Op::all_to_all:
        request.in.cut(&all_in, 1, size);
        shape.op == Op::all_to_all ? request.out.cut(&all_out, 1, size) : request.out.add_block(&one_out, 1);
        break;
      case Op::scatter:
        if (is_root) request.in.cut(&all_in, 1, size);
        request.out.add_block(&one_out, 1);
        break;
      case Op::all_gather:
      case Op::split_group:
      case Op::merge_remote_group:
      case Op::gather:
        request.in.add_block(&one_in, 1);
        if (is_root || shape.op != Op::gather) request.out.cut(&all_out, 1, size);
        break;
      case Op::all_reduce:
      case Op::reduce:
        request.in.add_block(&one_in, 1);
        if (is_root || shape.op == Op::all_reduce) request.out.add_block(&one_in, 1);
        break;
      case Op::send:
      case Op::recv:
        break;
    }
  });
}

// Calls that succeed first, so that the failure comes anywhere in the rings of words and slots. The last is a barrier:
// behind it no rank can fail in one of these any more.
void agree(GroupEnd& group, std::uint64_t num, Complaints& complaints) {
  for (std::uint64_t i = 1; i <= num; ++i) {
    const Shape others = i % 2 == 0 ? kSum : Shape{.op = Op::broadcast, .root = 0};
    if (run_shape(group, i == num ? kBarrierCall : others) != Result::finished) {
      complaints.push_back("a call before the failure did not finish");
    }
  }
}

// Until these ranks have arrived in the next call. Works before the first tick only, where ticks are calls.
void wait_arrived(const Segment& segment, const std::vector<int>& ranks) {
  for (const int rank : ranks) {
    const auto& staged = segment.control(segment.seat_of(rank)).counters[static_cast<std::size_t>(Counter::staged)];
    while (staged.load(std::memory_order_relaxed) == 0) std::this_thread::yield();
  }
}

bool waits_for_all(const Shape& shape, int rank) {
  if (shape.op == Op::gather || shape.op == Op::reduce) return shape.root == rank;
  return shape.op != Op::broadcast && shape.op != Op::scatter;
}

// Here the calls' results may be compared, too: they lie in one piece.
Tuning comparing_tuning(Random& random) {
  Tuning tuning = random_tuning(random);
  tuning.check = random.pick({Check::on, Check::full});
  return tuning;
}

// One rank calls something else.
Complaints mismatch(int size, Random& random, const Shape& common, const Shape& odd_shape) {
  World world(size, comparing_tuning(random));
  const int odd = size - 1;
  const std::uint64_t before = random.below(2 * kRing);
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    agree(world[rank], before, mine);
    const Shape& shape = rank == odd ? odd_shape : common;
    const Result first = run_shape(world[rank], shape);
    if (waits_for_all(shape, rank)) {
      expect_failed_or_late(mine, world, rank, before + 1, first);
      if (rank == odd) expect_result(mine, first, {Result::failed}, "the call that does not match");
    }
    const Result next = run_shape(world[rank], kBarrierCall);
    expect_result(mine, next, {Result::failed, Result::was_broken}, "the call after the mismatch");
    expect_result(mine, run_shape(world[rank], kBarrierCall), {Result::was_broken}, "a call on a broken group");
  });
  const Failure failure = world[0].failure();
  expect_failure(complaints, failure, FailureKind::mismatch, before + 1);
  expect(complaints, failure.rank == odd || failure.peer == odd, "the odd rank to be named");
  for (const int rank : {failure.rank, failure.peer}) {
    const Testimony& seen = world.testimony(rank);
    const Op op = rank == odd ? odd_shape.op : common.op;
    expect(complaints, seen.call.seq == before + 1 && seen.call.description.op == op, "what the two ranks had called");
    expect(complaints, seen.completed.seq == before, "the last call that the two ranks had completed");
    expect(complaints, seen.call.where == place_of(rank).text, "where the two ranks had called");
  }
  return complaints;
}

// One rank has claimed the report of a failure, and is held up before it says what it has found; so are `others` that
// took over. The rest find a failure of their own, and say that.
Complaints held_up_report(int size, Random& random, std::uint32_t others) {
  World world(size, comparing_tuning(random));
  const ReportState state = ReportState::claimed(others, 0);
  world.segment->header().report_state.store(state.word());
  const std::vector<int> present = all_but(size, {0});
  Complaints complaints = on_ranks(present, [&](int rank, Complaints& mine) {
    expect_failed_or_late(mine, world, rank, 1, run_shape(world[rank], rank == 1 ? kBarrierCall : kSum));
    expect_result(mine, run_shape(world[rank], kBarrierCall), {Result::was_broken}, "a call on a broken group");
  });
  const Failure failure = world[0].failure();
  expect_failure(complaints, failure, FailureKind::mismatch, 1);
  for (const int rank : {failure.rank, failure.peer}) {
    const Testimony& seen = world.testimony(rank);
    expect(complaints, seen.call.seq == 1, "what the two ranks had called");
  }
  return complaints;
}

// A rank takes over a report while this rank writes to it, and is held up then. This rank takes over in turn.
Complaints report_taken_over(int size, Random& random) {
  World world(size, random_tuning(random));
  Lines lines(*world.segment, 0);
  Failure failure{};
  failure.kind = FailureKind::mismatch;
  bool taken = false;
  const auto take_over = [&](std::uint32_t report) {
    if (std::exchange(taken, true)) return;
    world.segment->header().report_state.store(ReportState::claimed(report + 1, 1).word());
  };
  Reporting reporting(lines);
  reporting.begin({failure, take_over}, Clock::now());
  while (!reporting.advance(Clock::now())) reporting.nap(Clock::time_point::max());
  Complaints complaints;
  expect(complaints, lines.failed() && lines.failure().kind == FailureKind::mismatch, "the group to have a failure");
  return complaints;
}

// The time of a call is up while the report of a failure is held up.
Complaints held_up_until_timeout(int size, Random& random) {
  World world(size, comparing_tuning(random));
  world.segment->header().report_state.store(ReportState::claimed(0, 0).word());
  Complaints complaints = on_ranks(all_but(size, {0}), [&](int rank, Complaints& mine) {
    const Result result = run_shape(world[rank], kBarrierCall, kShortTimeout);
    // A rank may come when the time of another one is up.
    expect_result(mine, result, {Result::failed, Result::was_broken}, "a call");
  });
  const Failure failure = world[0].failure();
  expect_failure(complaints, failure, FailureKind::timeout, 1);
  expect(complaints, missing_in(failure).front() == 0, "the rank that is held up to be missing");
  return complaints;
}

// A root that sends and peers that send to it: nobody waits, so nobody compares until the ring comes round.
Complaints mismatch_unseen(int size, Random& random) {
  World world(size, comparing_tuning(random));
  const std::uint64_t before = random.below(2 * kRing);
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    agree(world[rank], before, mine);
    const Shape shape{.op = rank == 0 ? Op::broadcast : Op::gather, .root = 0};
    int finished = 0;
    while (finished <= kSlots && run_shape(world[rank], shape) == Result::finished) ++finished;
    expect(mine, finished <= kSlots, "the mismatch to be found within the next kSlots calls");
  });
  expect_failure(complaints, world[0].failure(), FailureKind::mismatch, before + 1);
  return complaints;
}

// Sender and receiver of one pair of an all_to_all disagree; their signatures do not.
Complaints mismatch_of_sizes(int size, Random& random) {
  World world(size, comparing_tuning(random));
  const int receiver = random_rank(random, size);
  const int sender = (receiver + 1) % size;
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    std::vector<std::byte> from(64), to(64);
    const Result first = run_call(world[rank], kPatience, kBetweenLooks, [&](Request& request) {
      request.op = Op::all_to_all;
      request.count = -1;
      request.in.clear();
      request.out.clear();
      for (int peer = 0; peer < size; ++peer) {
        const Piece in{from.data(), 8}, out{to.data(), rank == receiver && peer == sender ? 16u : 8u};
        request.in.add_block(&in, 1);
        request.out.add_block(&out, 1);
      }
    });
    if (rank == receiver) expect_result(mine, first, {Result::failed}, "the receiver's call");
    const Result next = run_shape(world[rank], kBarrierCall);
    expect_result(mine, next, {Result::failed, Result::was_broken}, "the call after the mismatch");
  });
  const Failure failure = world[0].failure();
  expect_failure(complaints, failure, FailureKind::mismatch, 1);
  const Splits& splits = failure.splits;
  expect(complaints, splits.sender == sender && splits.receiver == receiver, "sender and receiver to be named");
  expect(complaints, splits.bytes_sent == 8 && splits.bytes_expected == 16, "the sizes to be named");
  expect(complaints, failure.rank != failure.peer && failure.call.op == Op::all_to_all, "the finder and its call");
  return complaints;
}

// `absent` ranks never come. The last of the others has the short timeout and calls when the rest have arrived.
Complaints timeout(int size, Random& random, const Shape& shape, const std::vector<int>& absent,
                   const std::vector<int>& expected) {
  World world(size, random_tuning(random));
  std::vector<int> present = all_but(size, absent);
  const int judge = present.back();
  const std::vector<int> others(present.begin(), present.end() - 1);
  Complaints complaints = on_ranks(present, [&](int rank, Complaints& mine) {
    if (rank == judge) wait_arrived(*world.segment, others);
    const Result result =
        run_shape(world[rank], shape, rank == judge ? std::chrono::nanoseconds(kShortTimeout) : kPatience);
    expect_result(mine, result, {Result::failed}, "a call that lacks a peer");
  });
  const Failure failure = world[judge].failure();
  expect_failure(complaints, failure, FailureKind::timeout, 1);
  expect(complaints, failure.rank == judge, "the rank whose time was up to be named");
  expect(complaints, missing_in(failure) == expected, "exactly the ranks that were waited for to be missing");
  return complaints;
}

Complaints timeout_of_random_ranks(int size, Random& random) {
  std::vector<int> absent;
  for (int rank = 0; rank < size; ++rank) {
    if (static_cast<int>(absent.size()) < size - 1 && random.one_in(2)) absent.push_back(rank);
  }
  if (absent.empty()) absent.push_back(random_rank(random, size));
  return timeout(size, random, random.one_in(2) ? kSum : kBarrierCall, absent, absent);
}

// Receivers of a broadcast wait for its root alone, whoever else is absent.
Complaints timeout_of_root(int size, Random& random) {
  std::vector<int> absent{0};
  if (size > 2) absent.push_back(1);
  return timeout(size, random, Shape{.op = Op::broadcast, .root = 0}, absent, {0});
}

// All but one rank wait; a thread that makes no calls aborts.
Complaints abort_of_waits(int size, Random& random) {
  World world(size, random_tuning(random));
  const int absent = random_rank(random, size);
  const int aborting = random_rank(random, size);
  const std::vector<int> waiting = all_but(size, {absent});
  std::thread aborter([&] {
    wait_arrived(*world.segment, waiting);
    world[aborting].abort("enough");
  });
  Complaints complaints = on_ranks(waiting, [&](int rank, Complaints& mine) {
    expect_result(mine, run_shape(world[rank], kBarrierCall), {Result::failed}, "an aborted call");
    expect_result(mine, run_shape(world[rank], kBarrierCall), {Result::was_broken}, "a call on a broken group");
  });
  aborter.join();
  const Failure failure = world[absent].failure();
  expect(complaints, failure.kind == FailureKind::aborted, "an abort");
  expect(complaints, failure.rank == aborting && std::strcmp(failure.reason, "enough") == 0,
         "who aborted and its words");
  return complaints;
}

// All ranks work; the abort comes from another thread at any moment.
Complaints abort_of_work(int size, Random& random) {
  World world(size, random_tuning(random));
  const int aborting = random_rank(random, size);
  std::thread aborter([&, yields = random.below(400)] {
    // Where calls are is asked from any thread, too.
    for (std::uint64_t i = 0; i < yields && world[aborting].seq() <= yields; ++i) yield_times(1);
    world[aborting].abort("enough");
  });
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints&) {
    while (run_shape(world[rank], kSum) == Result::finished) continue;
  });
  aborter.join();
  expect(complaints, world[0].failure().kind == FailureKind::aborted, "an abort");
  return complaints;
}

// One rank leaves, before its peers call or while they wait. What does not need it goes on.
Complaints leave(int size, Random& random, bool while_waiting) {
  World world(size, random_tuning(random));
  const int leaver = random_rank(random, size);
  const std::vector<int> others = all_but(size, {leaver});
  Complaints complaints;
  if (!while_waiting) {
    world[leaver].leave(Leaving::closed);
    complaints = on_ranks(others, [&](int rank, Complaints& mine) {
      const Result result = run_shape(world[rank], Shape{.op = Op::broadcast, .root = others.front()});
      expect_result(mine, result, {Result::finished}, "a broadcast that does not need the rank that left");
    });
  }
  std::thread leaving([&] {
    if (!while_waiting) return;
    wait_arrived(*world.segment, others);
    world[leaver].leave(Leaving::closed);
  });
  const Complaints late = on_ranks(others, [&](int rank, Complaints& mine) {
    const Result result = run_shape(world[rank], kBarrierCall);
    if (while_waiting) expect_result(mine, result, {Result::failed}, "a call whose peer leaves");
    expect_result(mine, result, {Result::failed, Result::was_broken}, "a call whose peer has left");
  });
  leaving.join();
  complaints.insert(complaints.end(), late.begin(), late.end());
  const Failure failure = world[leaver].failure();
  expect_failure(complaints, failure, FailureKind::left, while_waiting ? 1 : 2);
  expect(complaints, failure.peer == leaver, "the rank that left to be named");
  return complaints;
}

// Two threads of every rank call at once; the group takes their calls one after another.
Complaints shared_groups(int size, Random& random) {
  constexpr int kCalls = 12;
  World world(size, random_tuning(random));
  std::vector<int> ranks = all_ranks(2 * size);
  for (int& rank : ranks) rank %= size;
  Complaints complaints = on_ranks(ranks, [&](int rank, Complaints& mine) {
    for (int i = 0; i < kCalls; ++i) {
      std::vector<std::int32_t> numbers(kSomeElements, rank + 1);
      const Piece piece{reinterpret_cast<std::byte*>(numbers.data()), numbers.size() * sizeof(numbers[0])};
      const Result result = run_call(world[rank], kPatience, kBetweenLooks, [&](Request& request) {
        request.op = Op::all_reduce;
        request.reduce_op = static_cast<int>(ReduceOp::sum);
        request.dtype = DType::int32;
        request.count = kSomeElements;
        request.in.clear();
        request.out.clear();
        request.in.add_block(&piece, 1);
        request.out.add_block(&piece, 1);
      });
      expect_result(mine, result, {Result::finished}, "a call of one of two threads");
      const auto right = [&](std::int32_t number) { return number == size * (size + 1) / 2; };
      expect(mine, std::all_of(numbers.begin(), numbers.end(), right), "the sum over ranks");
    }
  });
  for (GroupEnd* group : {&world[0], &world[size - 1]}) expect(complaints, group->seq() == 2 * kCalls, "a seq a call");
  return complaints;
}

struct MismatchCase {
  const char* what;
  Shape common, odd;
};

std::vector<MismatchCase> mismatch_cases() {
  const Shape max{Op::all_reduce, -1, DType::int32, static_cast<int>(ReduceOp::max)};
  const Shape floats{Op::all_reduce, -1, DType::float32, static_cast<int>(ReduceOp::sum)};
  const Shape longer{Op::all_reduce, -1, DType::int32, static_cast<int>(ReduceOp::sum), 20 * kSomeElements};
  const Shape from_0{.op = Op::broadcast, .root = 0}, from_1{.op = Op::broadcast, .root = 1};
  const Shape gathered{.op = Op::all_gather}, other_layout{.op = Op::all_gather, .layout = 7};
  return {{"op", kSum, kBarrierCall}, {"op of a rank that does not wait", kSum, Shape{.op = Op::gather, .root = 0}},
          {"reduce op", kSum, max},   {"dtype", kSum, floats},
          {"count", kSum, longer},    {"layout", gathered, other_layout},
          {"root", from_0, from_1}};
}

}  // namespace

void run_failure_cases(Tally& tally, int size, std::uint64_t seed) {
  std::uint64_t number = 0;
  const auto run = [&](const std::string& name, const std::function<Complaints(Random&)>& body) {
    tally.run_seeded(name, size, seed, ++number, body);
  };
  run("two threads a rank", [&](Random& random) { return shared_groups(size, random); });
  if (size == 1) return;
  for (const MismatchCase& one : mismatch_cases()) {
    run(std::string("mismatch of ") + one.what,
        [&](Random& random) { return mismatch(size, random, one.common, one.odd); });
  }
  run("mismatch that nobody sees", [&](Random& random) { return mismatch_unseen(size, random); });
  run("mismatch of sizes", [&](Random& random) { return mismatch_of_sizes(size, random); });
  if (size > 2) {
    run("a report that is held up", [&](Random& random) { return held_up_report(size, random, 0); });
    run("reports that are held up", [&](Random& random) { return held_up_report(size, random, kReports - 2); });
  }
  run("a report that is taken over", [&](Random& random) { return report_taken_over(size, random); });
  run("timeout while a report is held up", [&](Random& random) { return held_up_until_timeout(size, random); });
  run("timeout", [&](Random& random) { return timeout_of_random_ranks(size, random); });
  run("timeout of a root", [&](Random& random) { return timeout_of_root(size, random); });
  run("abort of waits", [&](Random& random) { return abort_of_waits(size, random); });
  run("abort of work", [&](Random& random) { return abort_of_work(size, random); });
  run("leave before calls", [&](Random& random) { return leave(size, random, false); });
  run("leave during calls", [&](Random& random) { return leave(size, random, true); });
}

}  // namespace stress
