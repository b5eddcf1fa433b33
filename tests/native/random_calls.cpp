// Random calls that each rank waits for one by one, with ranks held up at random so that roots run ahead.
#include "plans.hpp"

namespace stress {

namespace {

constexpr std::uint64_t kCallsAWorld = 150;
constexpr std::uint64_t kLongCallsAWorld = 40;

void make_calls(GroupEnd& group, std::uint64_t seed, const Tuning& tuning, Mixture mixture, Complaints& complaints) {
  const std::uint64_t num_calls = mixture == Mixture::all_ops ? kCallsAWorld : kLongCallsAWorld;
  for (std::uint64_t index = 0; index < num_calls; ++index) {
    const Plan plan = random_plan(seed, index, group.size(), tuning, mixture);
    Random random(mix(mix(seed, index), static_cast<std::uint64_t>(group.rank()) + 1));
    const Side side(plan, group.rank(), random);
    if (random.one_in(4)) yield_times(random.below(200));
    const std::chrono::microseconds first_look(random.pick({0, 20, 50'000}));
    const Result result = run_call(group, kPatience, first_look, [&](Request& request) { side.fill(request); });
    if (result != Result::finished) {
      const Failure failure = group.failure();
      complaints.push_back(text("call %llu, %s: %s (failure %u by rank %d at seq %llu: '%s')",
                                static_cast<unsigned long long>(index), plan.describe().c_str(), name_of(result),
                                static_cast<unsigned>(failure.kind), failure.rank,
                                static_cast<unsigned long long>(failure.seq), failure.reason));
      return;
    }
    side.check(complaints);
  }
}

}  // namespace

Complaints check_random_calls(int size, std::uint64_t seed, Mixture mixture) {
  Random random(seed);
  Tuning tuning = random_tuning(random);
  if (mixture == Mixture::long_reductions) tuning.chunk_bytes = 256;
  const auto segment = make_segment(size, tuning);
  return on_ranks(all_ranks(size), [&](int rank, Complaints& complaints) {
    // Made and unmade by its thread: a rank that is through leaves while its peers still work.
    GroupEnd group(segment, rank);
    make_calls(group, seed, tuning, mixture, complaints);
  });
}

}  // namespace stress
