// What the parts of the native stress test share: ranks as threads over one mapping, calls as bindings.cpp makes them,
// random numbers that every rank draws alike, and the tally.
//
// Ranks of a world share nothing but its segment while they run: a lock or a counter of the test's own between their
// calls would order what the core must order, and hide a race from the thread sanitizer.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "group.hpp"

namespace stress {

using namespace phalanx;

// Longer than any call takes that is to succeed, on a slow and busy machine too.
inline constexpr std::chrono::seconds kPatience{20};
// As in bindings.cpp.
inline constexpr std::chrono::milliseconds kBetweenLooks{50};
inline constexpr int kWorldSizes[] = {1, 2, 3, 4, 8};

constexpr std::uint64_t mix(std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t x = (a + 0x9e3779b97f4a7c15) ^ (b * 0xd1342543de82ef95);
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93;
  return x ^ (x >> 32);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}
  std::uint64_t next() noexcept { return state_ = mix(state_, 1); }
  std::uint64_t below(std::uint64_t limit) noexcept { return next() % limit; }
  bool one_in(std::uint64_t n) noexcept { return below(n) == 0; }
  template <class T, std::size_t kNum>
  T pick(const T (&list)[kNum]) noexcept {
    return list[below(kNum)];
  }

 private:
  std::uint64_t state_;
};

[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...);

// Slots, chunks and one-shot limits small enough that short calls take all paths; waiters that spin,
// lend their CPU or sleep at once.
Tuning random_tuning(Random& random);

// What went wrong; empty where nothing did.
using Complaints = std::vector<std::string>;

// A segment and a group for each rank.
struct World {
  World(int size, const Tuning& tuning);
  Group& operator[](int rank) { return *groups[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(groups.size()); }

  std::shared_ptr<Segment> segment;
  std::vector<std::unique_ptr<Group>> groups;
};

// Runs fn(rank, complaints) on a thread for each of the ranks and joins them all.
Complaints on_ranks(const std::vector<int>& ranks, const std::function<void(int, Complaints&)>& fn);
std::vector<int> all_ranks(int size);

enum class Result { finished, failed, was_broken };
const char* name_of(Result result);

// One call: `fill` sets the request. The core looks around for the first time when `first_look` has passed.
template <class Fill>
Result run_call(Group& group, std::chrono::nanoseconds timeout, std::chrono::nanoseconds first_look, Fill&& fill) {
  while (!group.acquire(Clock::now() + kBetweenLooks)) continue;
  fill(group.request());
  Result result = Result::was_broken;
  if (!group.broken()) {
    group.start(timeout);
    Outcome outcome = group.proceed(Clock::now() + first_look);
    while (outcome == Outcome::pending) outcome = group.proceed(Clock::now() + kBetweenLooks);
    result = outcome == Outcome::finished ? Result::finished : Result::failed;
  }
  group.release();
  return result;
}

inline void yield_times(std::uint64_t times) {
  for (; times > 0; --times) std::this_thread::yield();
}

// Runs cases one after another, counts them, and prints those that fail.
class Tally {
 public:
  void run(const std::string& name, const std::function<Complaints()>& body);
  std::string running() const;  // from any thread
  int num_passed() const { return passed_; }
  int num_failed() const { return failed_; }

 private:
  mutable std::mutex mutex_;
  std::string running_;
  int passed_ = 0;
  int failed_ = 0;
};

// Random calls on every rank, each result compared with a plain computation (random_calls.cpp).
// Reductions of many ticks get a mixture of their own: theirs are the slots that are written twice and read twice.
enum class Mixture { all_ops, long_reductions };
Complaints check_random_calls(int size, std::uint64_t seed, Mixture mixture);
// Every way in which a call can fail, and calls from several threads (failures.cpp).
void run_failure_cases(Tally& tally, int size, std::uint64_t seed);

}  // namespace stress
