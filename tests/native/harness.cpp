#include "harness.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <utility>

namespace stress {

std::string text(const char* format, ...) {
  char buffer[512];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof(buffer), format, arguments);
  va_end(arguments);
  return buffer;
}

Tuning random_tuning(Random& random) {
  Tuning tuning{};
  tuning.slot_bytes = random.pick({4096u, 8192u});
  tuning.chunk_bytes = random.pick({256u, 1024u, 4096u});
  tuning.one_shot_bytes = random.pick({0u, 64u, 512u, 4096u});
  tuning.message_chunk_bytes = random.pick({64u, 500u, 1024u, 4096u});
  tuning.check = Check::on;
  tuning.crowded = static_cast<std::uint32_t>(random.below(2));
  tuning.spin_us = random.pick({0u, 1u, 20u});
  return tuning;
}

const Location& place_of(int rank) {
  static const std::vector<Location> places = [] {
    std::vector<Location> all;
    for (int i = 0; i < kMostRanks; ++i) {
      all.push_back({static_cast<std::uint32_t>(i) + 1, text("stress.cpp:%d, in rank", i), ""});
    }
    return all;
  }();
  return places[static_cast<std::size_t>(rank)];
}

Seating permuted(int size) {
  std::vector<std::int32_t> ranks;
  for (int seat = 0; seat < size; ++seat) ranks.push_back((seat + 1) % size);
  return Seating::of(ranks).value();
}

std::shared_ptr<Segment> make_segment(int size, const Tuning& tuning) {
  return std::make_shared<Segment>(Segment::create_private(permuted(size), tuning));
}

World::World(int size, const Tuning& tuning) : segment(make_segment(size, tuning)) {
  for (int rank = 0; rank < size; ++rank) {
    groups.push_back(std::make_unique<GroupEnd>(segment, rank));
    // Once, as several threads of a rank may call later.
    groups.back()->publish_location({&place_of(rank)});
  }
}

Complaints on_ranks(const std::vector<int>& ranks, const std::function<void(int, Complaints&)>& fn) {
  std::vector<Complaints> complaints(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      // Its own until the thread ends, so that no two ranks write to one cache line.
      Complaints mine;
      fn(ranks[i], mine);
      complaints[i] = std::move(mine);
    });
  }
  for (std::thread& thread : threads) thread.join();
  Complaints all;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    for (const std::string& complaint : complaints[i]) all.push_back(text("rank %d: ", ranks[i]) + complaint);
  }
  return all;
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

Looker::Looker(GroupEnd& group)
    : thread_([this, &group] {
        while (!stops_.load(std::memory_order_relaxed)) {
          group.calls().look(Clock::now() + std::chrono::milliseconds(5));
          group.messages().look(Clock::now() + std::chrono::milliseconds(5));
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }) {}

Looker::~Looker() {
  stops_.store(true, std::memory_order_relaxed);
  thread_.join();
}

const char* name_of(Result result) {
  constexpr const char* kNames[] = {"finished", "failed",    "was broken", "forked",   "nested",
                                    "left",     "no memory", "pending",    "no space", "not writable"};
  return kNames[static_cast<int>(result)];
}

std::shared_ptr<MessageTicket> start_message(GroupEnd& group, std::chrono::nanoseconds timeout,
                                             const Message& message) {
  auto ticket = std::make_shared<MessageTicket>();
  ticket->call.op = message.sends ? Op::send : Op::recv;
  ticket->call.peer = message.peer;
  ticket->call.tag = message.tag;
  ticket->call.dtype = message.dtype;
  ticket->call.count = message.count;
  ticket->data = message.data;
  ticket->location = &place_of(group.rank());
  const Result refused = refusal(group);
  if (refused == Result::was_broken) group.messages().give_up_if_idle();
  ticket->made = Clock::now();
  ticket->deadline = ticket->made + timeout;
  refused == Result::finished ? group.messages().submit(ticket) : ticket->end(refused);
  return ticket;
}

Result wait_for(Lane& lane, const Ticket& ticket, std::chrono::nanoseconds first_look) {
  std::chrono::nanoseconds look = first_look;
  while (ticket.pending()) {
    lane.wait(ticket, Clock::now() + look);
    look = kBetweenLooks;
  }
  return ticket.result();
}

Result poll(const Ticket& ticket) {
  // Later than any end that its own deadline, or that of a call before it, brings about.
  const auto until = Clock::now() + kPatience + std::chrono::seconds(5);
  while (ticket.pending() && Clock::now() < until) std::this_thread::yield();
  return ticket.result();
}

Notices::Notices(std::size_t num) : came_(num), thread_([this] { run(); }) {}

Notices::~Notices() {
  completions().set_closed(true);
  thread_.join();
  completions().set_closed(false);
}

bool Notices::expect(Ticket& ticket, std::size_t number) { return ticket.notify(number + 1); }

void Notices::wait(std::size_t number) const { came_[number].wait(0, std::memory_order_acquire); }

void Notices::run() {
  bool had = false;
  while (const std::uint64_t token = completions().next(std::exchange(had, true), false)) {
    if (token > came_.size() || came_[token - 1].exchange(1, std::memory_order_release) != 0) {
      in_order_.store(false);
      continue;
    }
    came_[token - 1].notify_all();
  }
}

void expect(Complaints& complaints, bool holds, const char* what) {
  if (!holds) complaints.push_back(std::string("expected ") + what);
}

void expect_result(Complaints& complaints, Result found, std::initializer_list<Result> allowed, const char* what) {
  if (std::find(allowed.begin(), allowed.end(), found) != allowed.end()) return;
  complaints.push_back(text("%s %s", what, name_of(found)));
}

void expect_failure(Complaints& complaints, const Failure& failure, FailureKind kind, std::uint64_t seq) {
  if (failure.kind == kind && failure.seq == seq) return;
  complaints.push_back(text("the failure has kind %u and seq %llu, expected %u and %llu",
                            static_cast<unsigned>(failure.kind), static_cast<unsigned long long>(failure.seq),
                            static_cast<unsigned>(kind), static_cast<unsigned long long>(seq)));
}

void expect_failed_or_late(Complaints& complaints, World& world, int rank, std::uint64_t seq, Result found) {
  expect_result(complaints, found, {Result::failed, Result::was_broken}, "the call that does not match");
  if (found != Result::was_broken) return;
  expect(complaints, world.testimony(rank).call.seq < seq, "a rank whose call was reported to be told of it");
}

std::vector<int> missing_in(const Failure& failure) {
  std::vector<int> ranks;
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if ((failure.missing[rank / 64] >> rank % 64 & 1) != 0) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<int> all_but(int size, const std::vector<int>& absent) {
  std::vector<int> ranks;
  for (const int rank : all_ranks(size)) {
    if (std::find(absent.begin(), absent.end(), rank) == absent.end()) ranks.push_back(rank);
  }
  return ranks;
}

void Tally::run(const std::string& name, const std::function<Complaints()>& body) {
  if (name.find(part_) == std::string::npos) return;
  {
    const std::lock_guard lock(mutex_);
    running_ = name;
  }
  const Complaints complaints = body();
  ++(complaints.empty() ? passed_ : failed_);
  if (complaints.empty()) return;
  std::printf("FAILED %s\n", name.c_str());
  for (const std::string& complaint : complaints) std::printf("  %s\n", complaint.c_str());
  std::fflush(stdout);
}

void Tally::run_seeded(const std::string& name, int size, std::uint64_t seed, std::uint64_t number,
                       const std::function<Complaints(Random&)>& body) {
  run(text("%s, %d ranks, seed %llu", name.c_str(), size, static_cast<unsigned long long>(seed)), [&] {
    Random random(mix(seed, number));
    return body(random);
  });
}

std::string Tally::running() const {
  const std::lock_guard lock(mutex_);
  return running_;
}

}  // namespace stress
