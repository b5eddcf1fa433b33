// Notes about calls that ranks refuse: written and closed by one rank while the others read them.
#include <cstdlib>

#include "harness.hpp"

namespace stress {

namespace {

constexpr std::uint64_t kRounds = 60;

// Barriers of different layouts do not match.
Result run_barrier(GroupEnd& group, std::uint32_t layout = 0) {
  group.refusals().call_made();
  return run_call(group, kPatience, kBetweenLooks, [&](Request& request) {
    request.op = Op::barrier;
    request.root = -1;
    request.layout = layout;
    request.in.clear();
    request.out.clear();
  });
}

// Of any length, and every letter tells whether it belongs to the text.
std::string note_text(int rank, std::uint64_t round, std::size_t length) {
  const std::string number = std::to_string(round) + ":";
  return number + std::string(length, static_cast<char>('a' + (round + static_cast<std::uint64_t>(rank)) % 26));
}

// A peer's note is that of its current round or of one next to it, and in one piece.
bool is_whole(const std::string& text, int rank, std::uint64_t round) {
  const std::size_t colon = text.find(':');
  if (colon == std::string::npos) return false;
  const std::uint64_t noted = std::strtoull(text.c_str(), nullptr, 10);
  return noted + 1 >= round && noted <= round + 1 && text == note_text(rank, noted, text.size() - colon - 1);
}

Complaints notes(int size, Random& random) {
  World world(size, random_tuning(random));
  const std::uint64_t seed = random.next();
  return on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    GroupEnd& group = world[rank];
    Random own(mix(seed, static_cast<std::uint64_t>(rank)));
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      if (own.one_in(2)) group.refusals().refuse_call(note_text(rank, round, own.below(1000)));
      const bool refuses_message = own.one_in(2);
      if (refuses_message) group.refusals().refuse_message(true, 0, 7, note_text(rank, round, own.below(1000)));
      for (int peer = 0; peer < size; ++peer) {
        for (const std::string& text : group.refusals().open_of(peer)) {
          expect(mine, is_whole(text, peer, round), "a note is not whole, or not of this round");
        }
      }
      // Another tag closes nothing.
      group.refusals().message_made(true, 0, 8);
      expect(mine, !refuses_message || !group.refusals().open_of(rank).empty(), "a note was closed too early");
      group.refusals().message_made(true, 0, 7);
      expect_result(mine, run_barrier(group), {Result::finished}, "the call after a refusal");
      expect(mine, group.refusals().open_of(rank).empty(), "a note is open although the call was made");
    }
  });
}

// The rank that refused a call makes another one: the report has the note.
Complaints mismatch_after_refusal(int size, Random& random) {
  if (size == 1) return {};
  Tuning tuning = random_tuning(random);
  tuning.check = Check::on;
  World world(size, tuning);
  const int odd = random_rank(random, size);
  const std::string text = note_text(odd, 1, 100);
  return on_ranks(all_ranks(size), [&](int rank, Complaints& mine) {
    GroupEnd& group = world[rank];
    if (rank == odd) group.refusals().refuse_call(text);
    const Result result = run_barrier(group, rank == odd ? 1 : 0);
    expect_failed_or_late(mine, world, rank, 1, result);
    if (rank == odd) expect_result(mine, result, {Result::failed}, "the call that does not match");
    const Testimony& found = world.testimony(odd);
    expect(mine, found.refused == text, "the report does not have the note");
  });
}

}  // namespace

void run_refusal_cases(Tally& tally, int size, std::uint64_t seed) {
  tally.run_seeded("notes about refused calls", size, seed, 1, [&](Random& random) { return notes(size, random); });
  tally.run_seeded("another call after a refused one", size, seed, 2,
                   [&](Random& random) { return mismatch_after_refusal(size, random); });
}

}  // namespace stress
