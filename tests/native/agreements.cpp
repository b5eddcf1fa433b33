// Ranks that post their calls and never wait: they run far apart, and a difference is found, named and told.
//
// Ranks are threads, each with an agreement of its own over one segment. The watcher of a rank is another thread, as
// the progress thread is in a process.
#include <algorithm>
#include <memory>
#include <thread>

#include "agreement.hpp"
#include "harness.hpp"

namespace stress {

namespace {

Description sum_of(std::int64_t count) {
  Description call;
  call.op = Op::all_reduce;
  call.reduce_op = static_cast<std::int8_t>(ReduceOp::sum);
  call.dtype = DType::float32;
  call.count = count;
  return call;
}

Description message(Op op, int peer, std::uint32_t tag, std::int64_t count) {
  Description call;
  call.op = op;
  call.peer = peer;
  call.tag = tag;
  call.dtype = DType::float32;
  call.count = count;
  return call;
}

// A group that only posts, with the progress thread as the watcher of all its ranks.
struct Posters {
  explicit Posters(int size) {
    Tuning tuning = tuning_for(size, size);
    tuning.purpose = Purpose::posting;
    segment = make_segment(size, tuning);
    for (int rank = 0; rank < size; ++rank) {
      auto member = std::make_shared<Member>(segment, rank);
      ranks.push_back(
          std::make_shared<Agreement>(member, [this] { num_told.fetch_add(1); }, [] { progress().wake(true); }));
      progress().add(ranks.back());
    }
    progress().wake(false);
  }
  ~Posters() {
    for (const auto& rank : ranks) progress().remove(rank);
  }
  Agreement& operator[](int rank) { return *ranks[static_cast<std::size_t>(rank)]; }
  const Testimony& testimony(int rank) {
    return segment->testimony(ranks.front()->member().lines.report(), segment->seat_of(rank));
  }
  // Every rank is told, although none of them does anything.
  void wait_until_told() const { wait_until(num_told, static_cast<int>(ranks.size())); }

  std::shared_ptr<Segment> segment;
  std::vector<std::shared_ptr<Agreement>> ranks;
  std::atomic<int> num_told{0};
};

// Ranks of any speed that agree: nobody is accused.
Complaints same_calls(int size, Random& random) {
  Posters posters(size);
  const std::uint64_t num = 2000 + random.below(2000), seed = random.next();
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints&) {
    Random mine(mix(seed, static_cast<std::uint64_t>(rank)));
    for (std::uint64_t seq = 1; seq <= num; ++seq) {
      posters[rank].post(sum_of(static_cast<std::int64_t>(seq % 7)), &place_of(rank));
      if (mine.one_in(200)) yield_times(mine.below(50));
    }
  });
  for (const auto& rank : posters.ranks) {
    expect(complaints, !rank->has_found() && !rank->member().lines.failed(), "no difference to be found");
  }
  return complaints;
}

// One rank makes another call, and all go on: the difference is found, and the call is named as far as rings reach.
Complaints another_call(int size, Random& random) {
  Posters posters(size);
  const std::uint64_t odd_seq = 1 + random.below(500), after = random.below(200);
  const int odd = random_rank(random, size);
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints&) {
    for (std::uint64_t seq = 1; seq <= odd_seq + after; ++seq) {
      posters[rank].post(sum_of(rank == odd && seq == odd_seq ? 99 : 1), &place_of(rank));
    }
  });
  posters.wait_until_told();
  const Failure failure = posters[0].member().lines.failure();
  expect(complaints, failure.kind == FailureKind::mismatch, "a mismatch");
  expect(complaints, failure.rank == odd || failure.peer == odd, "the odd rank to be named");
  expect(complaints, failure.agreed < odd_seq && odd_seq <= failure.seq, "the call to be where they say");
  // One that is far ahead may have found it by the words that it keeps, and has replaced the call.
  const Testimony& seen = posters.testimony(failure.rank);
  if (failure.agreed + 1 == failure.seq && seen.call.seq != 0) {
    expect(complaints, seen.call.seq == odd_seq, "what the finder had called");
    expect(complaints, seen.call.description.count == (failure.rank == odd ? 99 : 1), "its count");
    expect(complaints, seen.call.where == place_of(failure.rank).text, "where it had called it");
  }
  return complaints;
}

// Ranks one after another, each far behind the one before.
Complaints far_behind(int size, Random& random) {
  Posters posters(size);
  const std::uint64_t num = 1 + random.below(100'000), odd_seq = 1 + random.below(num);
  const int odd = random_rank(random, size);
  for (int rank = 0; rank < size; ++rank) {
    for (std::uint64_t seq = 1; seq <= num && !posters[rank].has_found(); ++seq) {
      posters[rank].post(sum_of(rank == odd && seq == odd_seq ? 99 : 1), &place_of(rank));
    }
  }
  posters.wait_until_told();
  const Failure failure = posters[0].member().lines.failure();
  Complaints complaints;
  expect(complaints, failure.agreed < odd_seq && odd_seq <= failure.seq, "the call to be where they say");
  expect(complaints, posters.testimony(0).posted == num, "how far the first rank had come");
  return complaints;
}

// Ranks that post at once, with nothing between them but their posts: some rank always compares.
Complaints all_at_once(int size, Random& random) {
  constexpr int kRounds = 300;
  Complaints complaints;
  Tuning tuning = tuning_for(size, size);
  tuning.purpose = Purpose::posting;
  std::vector<Segment> segments;
  for (int round = 0; round < kRounds; ++round) segments.push_back(Segment::create_private(permuted(size), tuning));
  std::vector<std::vector<char>> found(static_cast<std::size_t>(size), std::vector<char>(kRounds, 0));
  std::vector<std::atomic<int>> num_ready(kRounds);
  const std::uint64_t odd = random.next();
  on_ranks(all_ranks(size), [&](int rank, Complaints&) {
    for (std::size_t round = 0; round < kRounds; ++round) {
      CallPosts posts(segments[round], rank);
      auto posting = std::make_unique<CallPosts::Poster>(rank, size);
      const bool is_odd = static_cast<std::uint64_t>(rank) == (odd + round) % static_cast<std::uint64_t>(size);
      num_ready[round].fetch_add(1, std::memory_order_relaxed);
      wait_until(num_ready[round], size);
      posting->post(posts, posted_word(is_odd ? 1 << 16 : 2 << 16, 0));
      found[static_cast<std::size_t>(rank)][round] = posting->difference() ? 1 : 0;
    }
  });
  for (std::size_t round = 0; round < kRounds; ++round) {
    const bool any = std::any_of(found.begin(), found.end(), [&](const auto& mine) { return mine[round] != 0; });
    expect(complaints, any, "the difference to be found by one of those who came at once");
  }
  return complaints;
}

// Within the ring's depth the call is named exactly, with what all ranks had called.
Complaints within_the_ring(int size, Random& random) {
  Posters posters(size);
  const std::uint64_t before = random.below(1000), ahead = random.below(kPostDepth - 2);
  // Others that differ would find it before the last one comes.
  const int odd = size > 2 ? size - 1 : random_rank(random, size);
  const auto post = [&](int rank, std::uint64_t seq) {
    posters[rank].post(sum_of(rank == odd && seq == before + 1 ? 99 : 1), &place_of(rank));
  };
  for (std::uint64_t seq = 1; seq <= before; ++seq) {
    for (int rank = 0; rank < size; ++rank) post(rank, seq);
  }
  for (int rank = 0; rank < size - 1; ++rank) {
    for (std::uint64_t seq = before + 1; seq <= before + 1 + ahead; ++seq) post(rank, seq);
  }
  Complaints complaints;
  expect(complaints, !posters[size - 1].has_found(), "nothing to be found before all have posted the call");
  post(size - 1, before + 1);
  posters.wait_until_told();
  const Failure failure = posters[0].member().lines.failure();
  expect_failure(complaints, failure, FailureKind::mismatch, before + 1);
  expect(complaints, failure.agreed == before, "the calls before to agree");
  for (int rank = 0; rank < size; ++rank) {
    const MadeCall& call = posters.testimony(rank).call;
    expect(complaints, call.seq == before + 1 && call.description.count == (rank == odd ? 99 : 1),
           "what all had called");
    expect(complaints, call.where == place_of(rank).text, "where all had called");
  }
  return complaints;
}

// Each rank compares with its peers all the time while it posts: nobody is accused, and a difference is found.
Complaints compared_meanwhile(int size, Random& random) {
  Complaints complaints;
  for (const bool differs : {false, true}) {
    Posters posters(size);
    const std::uint64_t num = 3000, odd_seq = differs ? 1 + random.below(num) : 0;
    std::atomic<int> num_posting{size};
    // The threads behind the ranks compare.
    on_ranks(all_ranks(2 * size), [&](int number, Complaints&) {
      Agreement& rank = posters[number % size];
      if (number < size) {
        for (std::uint64_t seq = 1; seq <= num; ++seq) {
          rank.post(sum_of(number == 0 && seq == odd_seq ? 99 : 1), &place_of(number));
        }
        num_posting.fetch_sub(1);
      } else {
        while (num_posting.load() > 0 && !rank.compare()) std::this_thread::yield();
      }
    });
    if (differs) {
      posters.wait_until_told();
      const Failure failure = posters[0].member().lines.failure();
      expect(complaints, failure.agreed < odd_seq && odd_seq <= failure.seq, "the call to be where they say");
    }
    for (const auto& rank : posters.ranks) {
      expect(complaints, differs || !rank->has_found(), "no difference to be found");
    }
  }
  return complaints;
}

// Nothing moves any more: two ranks differ, and the others do not come.
Complaints others_absent(int size, Random& random) {
  Posters posters(size);
  const std::uint64_t before = random.below(100), ahead = random.below(1000);
  for (int rank = 0; rank < 2; ++rank) {
    for (std::uint64_t seq = 1; seq <= before; ++seq) posters[rank].post(sum_of(1), &place_of(rank));
  }
  // The rank behind stops at the call that differs.
  for (std::uint64_t i = 0; i <= ahead; ++i) posters[0].post(sum_of(1), &place_of(0));
  posters[1].post(sum_of(2), &place_of(1));
  posters.wait_until_told();
  Complaints complaints;
  const Failure failure = posters[0].member().lines.failure();
  expect_failure(complaints, failure, FailureKind::mismatch, before + 1);
  expect(complaints, failure.agreed == before || before + ahead > kPostDepth, "the calls before to agree");
  expect(complaints, posters.testimony(0).posted == before + 1 + ahead, "how far the first rank had come");
  expect(complaints, posters.testimony(1).call.description.count == 2, "what the rank behind had called");
  for (int rank = 2; rank < size; ++rank) {
    expect(complaints, posters.testimony(rank).posted == 0, "that the others had not come");
  }
  return complaints;
}

// The only rank that has found the difference does not report: as one that dies.
Complaints finder_dies(int size, Random& random) {
  Posters posters(size);
  const int dies = random_rank(random, size);
  progress().remove(posters.ranks[static_cast<std::size_t>(dies)]);
  for (int rank = 0; rank < size; ++rank) {
    if (rank != dies) posters[rank].post(sum_of(1), &place_of(rank));
  }
  posters[dies].post(sum_of(2), &place_of(dies));
  wait_until(posters.num_told, size - 1);
  Complaints complaints;
  expect(complaints, posters[dies].has_found(), "the last rank to find it");
  const Failure failure = posters[0].member().lines.failure();
  expect(complaints, failure.rank != dies && failure.peer == dies, "another rank to report it");
  return complaints;
}

// Messages of all pairs, with senders far ahead, and one that differs in its tag, its count, or its place in the order.
Complaints messages(int size, Random& random, bool differs) {
  Posters posters(size);
  const int sender = random_rank(random, size), receiver = (sender + 1) % size;
  const std::uint64_t num = 50, odd_seq = 1 + random.below(num), how = random.below(3);
  Complaints complaints = on_ranks(all_ranks(size), [&](int rank, Complaints&) {
    for (int peer = 0; peer < size; ++peer) {
      for (std::uint64_t seq = 1; seq <= num; ++seq) {
        posters[rank].post_message(message(Op::send, peer, static_cast<std::uint32_t>(seq), 5), &place_of(rank));
      }
    }
    for (int peer = 0; peer < size; ++peer) {
      for (std::uint64_t seq = 1; seq <= num; ++seq) {
        const bool odd = differs && rank == receiver && peer == sender && seq >= odd_seq;
        const auto tag = static_cast<std::uint32_t>(odd && how == 0   ? seq + 1000
                                                    : odd && how == 2 ? num + odd_seq - seq
                                                                      : seq);
        const std::int64_t count = odd && how == 1 ? 6 : 5;
        posters[rank].post_message(message(Op::recv, peer, tag, count), &place_of(rank));
      }
    }
  });
  const Lines& lines = posters[0].member().lines;
  // The order of the last message alone is the same.
  if (!differs || (how == 2 && odd_seq == num)) {
    for (const auto& rank : posters.ranks) expect(complaints, !rank->has_found(), "no difference to be found");
    return complaints;
  }
  posters.wait_until_told();
  const Failure failure = lines.failure();
  expect(complaints, failure.agreed < odd_seq && odd_seq <= failure.seq, "the message to be where they say");
  const bool is_pair =
      (failure.rank == sender && failure.peer == receiver) || (failure.rank == receiver && failure.peer == sender);
  expect(complaints, is_pair, "the two ranks to be named");
  return complaints;
}

// Two ranks that post in turns: what a report shows of a message.
Complaints message_in_turns(Random&) {
  Posters posters(2);
  posters[0].post_message(message(Op::send, 1, 3, 5), &place_of(0));
  posters[1].post_message(message(Op::recv, 0, 3, 5), &place_of(1));
  posters[1].post_message(message(Op::recv, 0, 4, 5), &place_of(1));
  posters[0].post_message(message(Op::send, 1, 4, 8), &place_of(0));
  posters.wait_until_told();
  Complaints complaints;
  const Failure failure = posters[0].member().lines.failure();
  expect_failure(complaints, failure, FailureKind::message, 2);
  expect(complaints, failure.rank == 1 && failure.call.count == 5 && failure.misfit.sent.count == 8, "both sides");
  for (int rank = 0; rank < 2; ++rank) {
    const Description& call = posters.testimony(rank).call.description;
    expect(complaints, call.tag == 4 && call.count == (rank == 0 ? 8 : 5) && call.peer == 1 - rank, "both messages");
  }
  return complaints;
}

// Two ranks differ and the third has not come. Nobody tends them but the case, with times of its own: the report waits
// for the third rank until it comes or is gone, or the grace is over.
enum class Third { stays_away, comes, leaves };

Complaints report_waits(Third third) {
  Tuning tuning = tuning_for(3, 3);
  tuning.purpose = Purpose::posting;
  const auto segment = make_segment(3, tuning);
  std::vector<std::shared_ptr<Member>> members;
  std::vector<std::unique_ptr<Agreement>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    members.push_back(std::make_shared<Member>(segment, rank));
    ranks.push_back(std::make_unique<Agreement>(members.back(), [] {}, [] {}));
  }
  const Clock::time_point start(std::chrono::hours(1));
  Agreement& finder = *ranks[1];
  ranks[0]->post(sum_of(1), &place_of(0));
  finder.post(sum_of(2), &place_of(1));
  Complaints complaints;
  expect(complaints, !finder.has_found() && finder.compare(), "the difference to be found when it is looked for");
  expect(complaints, !finder.advance(start), "the report to wait for the third rank");
  expect(complaints, !finder.advance(start + kMismatchGrace / 2), "the report to wait as long as the grace");
  expect(complaints, !members[0]->lines.failed(), "nothing to be told meanwhile");
  if (third == Third::comes) ranks[2]->post(sum_of(1), &place_of(2));
  if (third == Third::leaves) members[2]->lines.leave(Leaving::closed);
  const bool waits = third == Third::stays_away;
  expect(complaints, finder.advance(start + (waits ? kMismatchGrace : kMismatchGrace / 2)), "the report to be made");
  for (const auto& member : members) expect(complaints, member->lines.failed(), "all ranks to be told");
  const MadeCall& call = segment->testimony(members[0]->lines.report(), segment->seat_of(2)).call;
  expect(complaints, call.seq == (third == Third::comes ? 1u : 0u), "what the report says of the third rank");
  return complaints;
}

// Control lines only.
Complaints memory(Random&) {
  Tuning tuning = tuning_for(64, 64);
  tuning.purpose = Purpose::posting;
  Complaints complaints;
  for (const int size : {2, 8, 64}) {
    const std::size_t bytes = Offsets(size, tuning).total;
    expect(complaints, bytes <= static_cast<std::size_t>(size) * 64 * 1024, "at most 64 KiB per rank");
  }
  return complaints;
}

}  // namespace

void run_agreement_cases(Tally& tally, std::uint64_t seed) {
  tally.run_seeded("posts, memory", 64, seed, 1, memory);
  tally.run_seeded("posts, a message in turns", 2, seed, 2, message_in_turns);
  tally.run_seeded("posts, a report waits", 3, seed, 3, [](Random&) { return report_waits(Third::stays_away); });
  tally.run_seeded("posts, a report waits for one that comes", 3, seed, 4,
                   [](Random&) { return report_waits(Third::comes); });
  tally.run_seeded("posts, a report waits for one that leaves", 3, seed, 5,
                   [](Random&) { return report_waits(Third::leaves); });
  for (const int size : {2, 3, 4, 8}) {
    const auto run = [&](const char* name, std::uint64_t number, Complaints (*body)(int, Random&)) {
      tally.run_seeded(name, size, mix(seed, static_cast<std::uint64_t>(size)), number,
                       [&](Random& random) { return body(size, random); });
    };
    run("posts, same calls", 1, same_calls);
    run("posts, another call", 2, another_call);
    run("posts, far behind", 3, far_behind);
    run("posts, all at once", 7, all_at_once);
    run("posts, within the ring", 4, within_the_ring);
    run("posts, compared meanwhile", 8, compared_meanwhile);
    run("posts, others absent", 9, others_absent);
    run("posts, the finder dies", 10, finder_dies);
    run("posts, messages", 5, [](int num, Random& random) { return messages(num, random, false); });
    run("posts, another message", 6, [](int num, Random& random) { return messages(num, random, true); });
  }
}

}  // namespace stress
