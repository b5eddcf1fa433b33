// Ranks and their seats: which tables are right, and that what a rank publishes lies in its seat and nowhere else.
#include <cstdint>
#include <string>
#include <vector>

#include "harness.hpp"

namespace stress {

namespace {

Complaints tables(int size) {
  Complaints complaints;
  const Seating plain(size), other = permuted(size);
  for (const Seating* seating : {&plain, &other}) {
    expect(complaints, seating->size() == size, "a seat per rank");
    for (const int rank : all_ranks(size)) {
      expect(complaints, seating->rank_at(seating->seat_of(rank)) == rank, "the rank of a rank's seat");
    }
  }
  for (const Seat seat : plain.all()) {
    expect(complaints, plain.rank_at(seat) == static_cast<int>(seat), "rank r in seat r");
    expect(complaints, size == 1 || other.rank_at(seat) != static_cast<int>(seat), "other seats for all ranks");
  }
  const auto last = static_cast<std::size_t>(size) - 1;
  for (const int wrong : {-1, size, size == 1 ? 1 : plain.rank_at(Seat{0}), INT32_MAX, INT32_MIN}) {
    std::vector<std::int32_t> ranks = plain.ranks();
    ranks[last] = wrong;
    expect(complaints, !Seating::of(ranks), "no table without a seat for every rank");
  }
  return complaints;
}

// What ranks leave lies in their seats, and is found under their ranks.
Complaints published(int size, Random& random) {
  World world(size, random_tuning(random));
  Complaints complaints;
  for (const int rank : all_ranks(size)) {
    const auto claimed = [&](Seat seat) { return world.segment->control(seat).claimed.load() != 0; };
    expect(complaints, claimed(world[rank].member().seat()), "a rank to claim its seat");
    world[rank].refusals().refuse_call(std::to_string(rank));
    world[rank].say_last_words(std::to_string(rank));
  }
  for (const Seat seat : world.segment->seats()) {
    const std::string expected = std::to_string((static_cast<int>(seat) + 1) % size);
    expect(complaints, world.segment->refusal(seat, LaneKind::calls).text.read() == expected, "the note of a seat");
    expect(complaints, world.segment->last_words(seat).text == expected, "the last words of a seat");
  }
  for (const int rank : all_ranks(size)) {
    expect(complaints, world[0].last_words(rank) == std::to_string(rank), "the last words of a rank");
    const std::vector<std::string> notes = world[0].refusals().open_of(rank);
    expect(complaints, notes.size() == 1 && notes[0] == std::to_string(rank), "the note of a rank");
  }
  return complaints;
}

}  // namespace

void run_seat_cases(Tally& tally, int size, std::uint64_t seed) {
  tally.run_seeded("tables of seats", size, seed, 1, [&](Random&) { return tables(size); });
  tally.run_seeded("what lies in a seat", size, seed, 2, [&](Random& random) { return published(size, random); });
}

}  // namespace stress
