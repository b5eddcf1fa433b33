#include "harness.hpp"

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
  tuning.crowded = static_cast<std::uint32_t>(random.below(2));
  tuning.spin_us = random.pick({0u, 1u, 20u});
  return tuning;
}

World::World(int size, const Tuning& tuning)
    : segment(std::make_shared<Segment>(Segment::create_private(size, tuning))) {
  for (int rank = 0; rank < size; ++rank) groups.push_back(std::make_unique<Group>(segment, rank));
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

const char* name_of(Result result) {
  switch (result) {
    case Result::finished:
      return "finished";
    case Result::failed:
      return "failed";
    case Result::was_broken:
      return "was broken";
  }
  return "unknown";
}

void Tally::run(const std::string& name, const std::function<Complaints()>& body) {
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

std::string Tally::running() const {
  const std::lock_guard lock(mutex_);
  return running_;
}

}  // namespace stress
