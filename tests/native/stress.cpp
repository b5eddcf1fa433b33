// A stress test of the core with ranks as threads over one mapping, to run under sanitizers (sanitize.py): the thread
// sanitizer sees nothing between two mappings of one segment.
//
//   stress [seed] [rounds] [part of the names of the cases to run]
//
// A round has random calls and messages, waited for and left to the progress thread, and every kind of failure in
// worlds of 1 to 8 ranks. A seed gives the same calls again; how the threads interleave is up to the machine. The round
// in which something fails is the last.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

#include "harness.hpp"

namespace {

constexpr std::chrono::seconds kLimit{120};

// Ends the program when one case takes too long; calls have timeouts, so only a bug of the core or the test gets here.
void watch(const stress::Tally& tally, const std::atomic<bool>& ended) {
  std::string running;
  auto until = stress::Clock::time_point::max();
  while (!ended.load()) {
    if (std::string now = tally.running(); now != running) {
      running = std::move(now);
      until = stress::Clock::now() + kLimit;
    }
    if (stress::Clock::now() > until) {
      std::fprintf(stderr, "stress: no end after %d s: %s\n", static_cast<int>(kLimit.count()), running.c_str());
      std::abort();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const std::uint64_t rounds = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 3;
  stress::Tally tally(argc > 3 ? argv[3] : "");
  std::atomic<bool> ended{false};
  std::thread watchdog([&] { watch(tally, ended); });
  for (std::uint64_t round = 0; round < rounds && tally.num_failed() == 0; ++round) {
    stress::run_calling_cases(tally, stress::mix(seed, round));
    stress::run_handing_over_cases(tally, stress::mix(seed, round));
    stress::run_reporting_cases(tally, stress::mix(seed, round));
    stress::run_agreement_cases(tally, stress::mix(seed, round));
    stress::run_black_box_cases(tally, stress::mix(seed, round));
    for (const int size : stress::kWorldSizes) {
      const std::uint64_t world_seed = stress::mix(stress::mix(seed, round), static_cast<std::uint64_t>(size));
      for (const auto mixture : {stress::Mixture::all_ops, stress::Mixture::long_reductions}) {
        const char* what = mixture == stress::Mixture::all_ops ? "random calls" : "long reductions";
        tally.run(stress::text("%s, %d ranks, seed %llu", what, size, static_cast<unsigned long long>(world_seed)),
                  [&] { return stress::check_random_calls(size, world_seed, mixture); });
      }
      stress::run_async_cases(tally, size, world_seed);
      stress::run_message_cases(tally, size, world_seed);
      stress::run_failure_cases(tally, size, world_seed);
      stress::run_pending_failure_cases(tally, size, world_seed);
      stress::run_refusal_cases(tally, size, world_seed);
      stress::run_statistics_cases(tally, size, world_seed);
      stress::run_seat_cases(tally, size, world_seed);
    }
  }
  ended.store(true);
  watchdog.join();
  std::printf("%d passed, %d failed\n", tally.num_passed(), tally.num_failed());
  return tally.num_failed() == 0 && tally.num_passed() > 0 ? 0 : 1;
}
