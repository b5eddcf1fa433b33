// Records of calls that end late: their places in the ring may have gone to newer calls.
#include "black_box.hpp"

#include <cstddef>
#include <cstring>
#include <string>

#include "harness.hpp"

namespace stress {

namespace {

constexpr std::uint32_t kPlaces = 2;
constexpr std::size_t kCalls = 50'000;
// Calls that may wait for their marks: so many that one is marked about when its place is taken.
constexpr std::size_t kMostWaiting = 3;

template <class T>
T read_at(const std::string& contents, std::size_t place) {
  T value;
  std::memcpy(&value, contents.data() + place, sizeof(value));
  return value;
}

// A box as a reader sees it.
struct Seen {
  explicit Seen(const BlackBox& box) : contents(box.contents()) {
    const auto arena_bytes = read_at<std::uint32_t>(contents, offsetof(BoxHeader, arena_bytes));
    first = kPage + arena_bytes;
    num_hidden = read_at<std::int64_t>(contents, offsetof(BoxHeader, num_hidden));
  }
  template <class T>
  T field(std::size_t slot, std::size_t offset) const {
    return read_at<T>(contents, first + slot * sizeof(BoxRecord) + offset);
  }
  std::uint64_t id(std::size_t slot) const { return field<std::uint64_t>(slot, offsetof(BoxRecord, id)); }
  CallState state(std::size_t slot) const { return field<CallState>(slot, offsetof(BoxRecord, state)); }

  std::string contents;
  std::size_t first = 0;
  std::int64_t num_hidden = 0;
};

BoxEntry begin(BlackBox& box) {
  BoxCall call;
  call.created = Clock::now();
  return box.begin(call);
}

Failure timeout() {
  Failure failure{};
  failure.kind = FailureKind::timeout;
  return failure;
}

void mark(const BoxEntry& entry) {
  entry.number(7);
  entry.start(Clock::now());
  entry.blame(timeout());
  entry.end(false);
}

void await(const std::atomic<std::size_t>& count, std::size_t least) {
  while (count.load(std::memory_order_acquire) < least) std::this_thread::yield();
}

// A thread makes calls. Another one marks them late: often while the first one takes their places for newer calls.
Complaints taken_while_it_is_marked(Random&) {
  BlackBox box(-1, kPlaces, 0, 1, "stress");
  Complaints complaints;
  std::vector<BoxEntry> given(kCalls);
  std::atomic<std::size_t> num_given{0}, num_marked{0};
  std::thread late([&] {
    for (std::size_t number = 0; number < kCalls; ++number) {
      await(num_given, number + 1);
      mark(given[number]);
      num_marked.store(number + 1, std::memory_order_release);
    }
  });
  for (std::size_t number = 0; number < kCalls; ++number) {
    given[number] = begin(box);
    num_given.store(number + 1, std::memory_order_release);
    await(num_marked, number < kMostWaiting ? 0 : number - kMostWaiting);
  }
  late.join();
  const Seen seen(box);
  expect(complaints, seen.num_hidden == 0, "no call in flight without a record");
  for (std::size_t slot = 0; slot < kPlaces; ++slot) {
    expect(complaints, seen.state(slot) == CallState::failed, "the end of every call that has a record");
  }
  return complaints;
}

// The marker was held up in the middle of its mark while newer calls came round.
Complaints taken_around_a_mark(Random&) {
  BlackBox box(-1, kPlaces, 0, 1, "stress");
  Complaints complaints;
  const BoxEntry first = begin(box);
  begin(box);
  expect(complaints, first.claim(), "a call to mark its own record");
  const BoxEntry third = begin(box);
  expect(complaints, third.id() == 4, "the place that is being marked to be left out");
  first.release();
  first.end(true);
  const Seen seen(box);
  expect(complaints, seen.id(0) == first.id() && seen.state(0) == CallState::completed, "the mark of the first call");
  expect(complaints, seen.id(1) == third.id() && seen.num_hidden == 1, "the record of the third call");
  return complaints;
}

// The marker comes when its place is taken.
Complaints marked_after_it_was_taken(Random&) {
  BlackBox box(-1, kPlaces, 0, 1, "stress");
  Complaints complaints;
  const BoxEntry old = begin(box);
  begin(box).end(true);
  const BoxEntry fresh = begin(box);
  expect(complaints, !old.claim(), "no mark of a record that is another call's");
  expect(complaints, Seen(box).num_hidden == 1, "a call in flight without a record");
  mark(old);
  const Seen seen(box);
  const auto seq = seen.field<std::uint64_t>(0, offsetof(BoxRecord, seq));
  const auto started = seen.field<std::int64_t>(0, offsetof(BoxRecord, started));
  const auto ended = seen.field<std::int64_t>(0, offsetof(BoxRecord, ended));
  const auto failure = seen.field<std::uint8_t>(0, offsetof(BoxRecord, failure));
  expect(complaints, seen.id(0) == fresh.id() && seen.state(0) == CallState::scheduled, "the newer call as it was");
  expect(complaints, seq == 0 && started == 0 && ended == 0 && failure == 0, "no mark of the older call");
  expect(complaints, seen.num_hidden == 0, "the older call to have ended");
  return complaints;
}

}  // namespace

void run_black_box_cases(Tally& tally, std::uint64_t seed) {
  std::uint64_t number = 600;
  const auto run = [&](const char* name, const std::function<Complaints(Random&)>& body) {
    tally.run_seeded(name, 1, seed, ++number, body);
  };
  run("a record whose place is taken while it is marked", taken_while_it_is_marked);
  run("a record that is marked while others go round", taken_around_a_mark);
  run("a record that is marked when its place is taken", marked_after_it_was_taken);
}

}  // namespace stress
