// Calls that nobody waits for at once: many in flight, in several groups, from several threads, carried out by whoever
// waits for any of them or by the progress thread alone.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "plans.hpp"

namespace stress {

namespace {

constexpr std::uint64_t kCallsAWorld = 100;
constexpr std::uint64_t kMostInFlight = 40;
constexpr int kMostGroups = 3;
constexpr std::uint64_t kRounds = 3;
constexpr std::uint64_t kCallsARound = 8;
constexpr std::uint64_t kCallsAThread = 12;
constexpr std::uint64_t kRefills = 60;
constexpr std::uint64_t kLives = 25;

std::uint64_t unsigned_of(int value) { return static_cast<std::uint64_t>(value); }

std::size_t index_of(int value) { return static_cast<std::size_t>(value); }

// A random call under way.
struct Flight {
  Flight(GroupEnd& group, std::uint64_t seed, std::uint64_t number, const Tuning& tuning, Mixture mixture)
      : index(number),
        random(mix(mix(seed, number), unsigned_of(group.rank()) + 1)),
        plan(random_plan(seed, number, group.size(), tuning, mixture)),
        side(plan, group.rank(), random) {}

  void start(GroupEnd& group, Handing handing) {
    ticket = start_call(group, kPatience, handing, [&](Request& request) { side.fill(request); });
  }

  // False: it failed, as all that follow will.
  bool check(GroupEnd& group, Complaints& complaints) const {
    const Result result = ticket->result();
    if (result == Result::finished) {
      side.check(complaints);
      return true;
    }
    const Failure failure = group.failure();
    complaints.push_back(text("call %llu, %s: %s (failure %u by rank %d at seq %llu)",
                              static_cast<unsigned long long>(index), plan.describe().c_str(), name_of(result),
                              static_cast<unsigned>(failure.kind), failure.rank,
                              static_cast<unsigned long long>(failure.seq)));
    return false;
  }

  std::uint64_t index;
  Random random;
  Plan plan;
  Side side;
  std::shared_ptr<CallTicket> ticket;
  bool noticed = false;  // its notice is to be waited for
};

using Flights = std::vector<std::unique_ptr<Flight>>;

std::unique_ptr<Flight> take_random(Flights& flights, Random& random) {
  std::swap(flights[random.below(flights.size())], flights.back());
  std::unique_ptr<Flight> flight = std::move(flights.back());
  flights.pop_back();
  return flight;
}

// Comes to the end of the call in one of the ways there are.
bool finish(GroupEnd& group, Flight& flight, Notices& notices, std::size_t number, Complaints& complaints) {
  if (flight.noticed) {
    notices.wait(number);
  } else if (flight.random.one_in(6)) {
    if (poll(*flight.ticket) == Result::pending) complaints.push_back("nobody carried out a call that was polled");
  }
  wait_for(group.calls(), *flight.ticket, std::chrono::microseconds(flight.random.pick({0, 20, 50'000})));
  return flight.check(group, complaints);
}

// One group: so many calls in flight, ended in any order, with some in between that their callers wait for.
Complaints calls_in_flight(int size, Random& random, Mixture mixture) {
  const Tuning tuning = random_tuning(random);
  const std::uint64_t seed = random.next();
  const std::uint64_t num_calls = mixture == Mixture::all_ops ? kCallsAWorld : kCallsAWorld / 4;
  Notices notices(num_calls * unsigned_of(size));
  const auto segment = make_segment(size, tuning);
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    GroupEnd group(segment, rank);
    Random own(mix(seed, unsigned_of(rank)));
    const std::uint64_t window = 1 + own.below(kMostInFlight);
    std::optional<Looker> looker;
    if (own.one_in(8)) looker.emplace(group);
    Flights flights;
    const auto number = [&](const Flight& flight) { return unsigned_of(rank) * num_calls + flight.index; };
    bool good = true;
    const auto end_one = [&] {
      const std::unique_ptr<Flight> flight = take_random(flights, own);
      good = finish(group, *flight, notices, number(*flight), mine) && good;
    };
    for (std::uint64_t i = 0; i < num_calls && good; ++i) {
      flights.push_back(std::make_unique<Flight>(group, seed, i, tuning, mixture));
      Flight& flight = *flights.back();
      const bool sync = own.one_in(6);
      flight.start(group, sync ? Handing::waited_for : own.pick({Handing::at_once, Handing::later}));
      flight.noticed = own.one_in(3) && notices.expect(*flight.ticket, number(flight));
      if (sync) wait_for(group.calls(), *flight.ticket);  // behind all those in flight
      if (own.one_in(4)) yield_times(own.below(100));
      while (good && !flights.empty() && (flights.size() >= window || own.one_in(8))) end_one();
    }
    while (!flights.empty()) end_one();
    expect(mine, group.calls().idle(), "nothing to be left over");
  });
  expect(complaints, notices.in_order(), "one notice for each call that asked for it");
  return complaints;
}

// Several groups of the same ranks: each rank makes their calls in an order of its own.
Complaints groups_in_any_order(int size, Random& random) {
  const int num_groups = 2 + static_cast<int>(random.below(kMostGroups - 1));
  const Tuning tuning = random_tuning(random);
  const std::uint64_t seed = random.next();
  std::vector<std::shared_ptr<Segment>> segments;
  for (int i = 0; i < num_groups; ++i) {
    segments.push_back(make_segment(size, tuning));
  }
  return on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    Random own(mix(seed, unsigned_of(rank)));
    std::vector<std::unique_ptr<GroupEnd>> groups;
    for (const auto& segment : segments) groups.push_back(std::make_unique<GroupEnd>(segment, rank));
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      struct CallHandle {
        int group;
        std::unique_ptr<Flight> flight;
      };
      std::vector<CallHandle> pending;
      std::vector<std::uint64_t> made(groups.size(), 0);
      while (pending.size() < groups.size() * kCallsARound) {
        const int i = random_rank(own, num_groups);
        std::uint64_t& calls = made[index_of(i)];
        if (calls == kCallsARound) continue;
        GroupEnd& group = *groups[index_of(i)];
        auto flight = std::make_unique<Flight>(group, mix(seed, ~unsigned_of(i)), round * kCallsARound + calls++,
                                               tuning, Mixture::all_ops);
        flight->start(group, own.pick({Handing::at_once, Handing::later}));
        pending.push_back({i, std::move(flight)});
      }
      while (!pending.empty()) {
        std::swap(pending[own.below(pending.size())], pending.back());
        GroupEnd& group = *groups[index_of(pending.back().group)];
        wait_for(group.calls(), *pending.back().flight->ticket);
        if (!pending.back().flight->check(group, mine)) return;
        pending.pop_back();
      }
    }
  });
}

// A sum over ranks, the same call whichever thread makes it.
struct Sum {
  explicit Sum(const GroupEnd& group)
      : numbers(33, group.rank() + 1), expected(group.size() * (group.size() + 1) / 2) {}

  void start(GroupEnd& group, Handing handing) {
    ticket = start_call(group, kPatience, handing, [&](Request& request) {
      const Piece piece{reinterpret_cast<std::byte*>(numbers.data()), numbers.size() * sizeof(numbers[0])};
      request.op = Op::all_reduce;
      request.reduce_op = static_cast<int>(ReduceOp::sum);
      request.dtype = DType::int32;
      request.count = static_cast<std::int64_t>(numbers.size());
      request.in.add_block(&piece, 1);
      request.out.add_block(&piece, 1);
    });
  }
  void check(Complaints& complaints) const {
    expect_result(complaints, ticket->result(), {Result::finished}, "a sum");
    const auto right = [&](std::int32_t number) { return number == expected; };
    expect(complaints, std::all_of(numbers.begin(), numbers.end(), right), "the sum over ranks");
  }

  std::vector<std::int32_t> numbers;
  std::int32_t expected;
  std::shared_ptr<CallTicket> ticket;
};

// Three threads of every rank have calls in flight in one lane.
Complaints threads_in_one_lane(int size, Random& random) {
  constexpr int kThreads = 3;
  World world(size, random_tuning(random));
  const std::uint64_t seed = random.next();
  std::vector<int> threads = all_ranks(kThreads * size);
  Complaints complaints = on_ranks(threads, [&](int thread, Complaints& mine) {
    GroupEnd& group = world[thread % size];
    Random own(mix(seed, unsigned_of(thread)));
    std::vector<std::unique_ptr<Sum>> sums;
    for (std::uint64_t i = 0; i < kCallsAThread; ++i) {
      sums.push_back(std::make_unique<Sum>(group));
      const bool sync = own.one_in(4);
      sums.back()->start(group, sync ? Handing::waited_for : own.pick({Handing::at_once, Handing::later}));
      if (sync) wait_for(group.calls(), *sums.back()->ticket, std::chrono::microseconds(own.pick({0, 50})));
    }
    while (!sums.empty()) {
      std::swap(sums[own.below(sums.size())], sums.back());
      wait_for(group.calls(), *sums.back()->ticket, std::chrono::microseconds(own.pick({0, 50, 50'000})));
      sums.back()->check(mine);
      sums.pop_back();
    }
  });
  for (GroupEnd* group : {&world[0], &world[size - 1]}) {
    expect(complaints, group->seq() == kThreads * kCallsAThread, "a seq a call");
  }
  return complaints;
}

// One call at a time that only the progress thread can carry out: it goes to sleep in between, having nothing to do.
Complaints refills(int size, Random& random) {
  World world(size, random_tuning(random));
  Notices notices(kRefills * unsigned_of(size));
  const std::uint64_t seed = random.next();
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    Random own(mix(seed, unsigned_of(rank)));
    for (std::uint64_t i = 0; i < kRefills; ++i) {
      Sum sum(world[rank]);
      sum.start(world[rank], own.pick({Handing::at_once, Handing::later}));
      const std::size_t number = unsigned_of(rank) * kRefills + i;
      if (notices.expect(*sum.ticket, number)) notices.wait(number);
      sum.check(mine);
      yield_times(own.below(30));
    }
  });
  expect(complaints, notices.in_order(), "one notice for each call that asked for it");
  return complaints;
}

// Groups that live for a call and a message each: the progress thread ends with the last of them and starts with the
// next. Now and then all have ended before any other begins; else ranks are earlier or later.
Complaints short_lives(int size, Random& random) {
  const Tuning tuning = random_tuning(random);
  const std::uint64_t seed = random.next();
  std::vector<std::shared_ptr<Segment>> segments;
  for (std::uint64_t i = 0; i < kLives; ++i) {
    segments.push_back(make_segment(size, tuning));
  }
  std::atomic<int> ended{0};
  const auto live = [&](std::uint64_t i, int rank, Random& own, Complaints& mine) {
    GroupEnd group(segments[i], rank);
    Sum sum(group);
    sum.start(group, own.pick({Handing::at_once, Handing::later}));
    if (size > 1) {
      const std::size_t bytes = Random(mix(seed, ~i)).pick({8u, 3000u, 9000u});
      Bytes from(bytes, static_cast<std::byte>(rank + 1)), to(bytes);
      const int next = (rank + 1) % size, last = (rank + size - 1) % size;
      const auto count = static_cast<std::int64_t>(bytes);
      const auto receive = start_message(group, kPatience, {false, last, 0, DType::uint8, count, {to.data(), bytes}});
      const auto send = start_message(group, kPatience, {true, next, 0, DType::uint8, count, {from.data(), bytes}});
      if (own.one_in(2)) expect(mine, poll(*send) != Result::pending, "a send to end by itself");
      expect_result(mine, wait_for(group.messages(), *receive), {Result::finished}, "a receive");
      expect_result(mine, wait_for(group.messages(), *send), {Result::finished}, "a send");
      const auto right = [&](std::byte byte) { return byte == static_cast<std::byte>(last + 1); };
      expect(mine, std::all_of(to.begin(), to.end(), right), "what was sent");
    }
    if (own.one_in(2)) expect(mine, poll(*sum.ticket) != Result::pending, "a call to end by itself");
    wait_for(group.calls(), *sum.ticket);
    sum.check(mine);
  };
  return on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    Random own(mix(seed, unsigned_of(rank)));
    for (std::uint64_t i = 0; i < kLives; ++i) {
      live(i, rank, own, mine);
      ended.fetch_add(1, std::memory_order_relaxed);
      if (i % 3 == 0) wait_until(ended, (static_cast<int>(i) + 1) * size);
    }
  });
}

// Two threads wait for one call.
Complaints two_wait_for_one(int size, Random& random) {
  World world(size, random_tuning(random));
  return on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    for (int i = 0; i < 10; ++i) {
      Sum sum(world[rank]);
      sum.start(world[rank], Handing::later);
      Complaints theirs;
      std::thread other([&] {
        wait_for(world[rank].calls(), *sum.ticket);
        sum.check(theirs);
      });
      wait_for(world[rank].calls(), *sum.ticket);
      sum.check(mine);
      other.join();
      mine.insert(mine.end(), theirs.begin(), theirs.end());
    }
  });
}

}  // namespace

void run_async_cases(Tally& tally, int size, std::uint64_t seed) {
  std::uint64_t number = 100;
  const auto run = [&](const char* name, const std::function<Complaints(Random&)>& body) {
    tally.run_seeded(name, size, seed, ++number, body);
  };
  run("calls in flight", [&](Random& random) { return calls_in_flight(size, random, Mixture::all_ops); });
  run("long calls in flight", [&](Random& random) { return calls_in_flight(size, random, Mixture::long_reductions); });
  run("groups in any order", [&](Random& random) { return groups_in_any_order(size, random); });
  run("threads in one lane", [&](Random& random) { return threads_in_one_lane(size, random); });
  run("two wait for one", [&](Random& random) { return two_wait_for_one(size, random); });
  run("refills", [&](Random& random) { return refills(size, random); });
  run("short lives", [&](Random& random) { return short_lives(size, random); });
}

}  // namespace stress
