// What the calls of one rank in one group have taken so far: a sum per op, always on.
//
// The thread that ends a call holds its lane, and each op belongs to one lane. So a sum has one writer at a time, and
// the lane orders the writers: plain stores are enough. A reader takes no lock. It finds that a sum was written while
// it read it by the version, which is odd meanwhile, and reads again.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "layout.hpp"
#include "segment.hpp"

namespace phalanx {

class Statistics {
 public:
  static constexpr std::size_t kOps = kNumOps;

  struct Sum {
    std::uint64_t calls = 0;
    std::uint64_t bytes = 0;
    std::chrono::nanoseconds waiting{0};
    std::chrono::nanoseconds moving{0};
  };

  // A call has ended. With its lane held.
  void add(Op op, const Sum& more) noexcept {
    Line& line = lines_[static_cast<std::size_t>(op)];
    const std::uint64_t version = line.version.load(std::memory_order_relaxed);
    line.version.store(version + 1, std::memory_order_relaxed);
    // Released: a reader that sees one of these stores sees the odd version, too.
    const auto grow = [](std::atomic<std::uint64_t>& value, std::uint64_t by) {
      value.store(value.load(std::memory_order_relaxed) + by, std::memory_order_release);
    };
    grow(line.calls, more.calls);
    grow(line.bytes, more.bytes);
    grow(line.waiting, static_cast<std::uint64_t>(more.waiting.count()));
    grow(line.moving, static_cast<std::uint64_t>(more.moving.count()));
    line.version.store(version + 2, std::memory_order_release);
  }

  // From any thread. All of one moment, unless the writer is held up in the middle for that long.
  Sum of(Op op) const noexcept {
    const Line& line = lines_[static_cast<std::size_t>(op)];
    Sum sum;
    for (int tries = 0; tries < kMostTries; ++tries) {
      if (tries > 0) std::this_thread::yield();
      const std::uint64_t before = line.version.load(std::memory_order_acquire);
      sum.calls = line.calls.load(std::memory_order_acquire);
      sum.bytes = line.bytes.load(std::memory_order_acquire);
      sum.waiting = std::chrono::nanoseconds(line.waiting.load(std::memory_order_acquire));
      sum.moving = std::chrono::nanoseconds(line.moving.load(std::memory_order_acquire));
      if (before % 2 == 0 && line.version.load(std::memory_order_relaxed) == before) break;
    }
    return sum;
  }

  // A forked child is not the rank: it has made no calls.
  bool forked() const noexcept { return generation_ != fork_generation(); }

 private:
  static constexpr int kMostTries = 1000;

  struct alignas(kLine) Line {
    std::atomic<std::uint64_t> version{0};
    std::atomic<std::uint64_t> calls{0};
    std::atomic<std::uint64_t> bytes{0};
    std::atomic<std::uint64_t> waiting{0};
    std::atomic<std::uint64_t> moving{0};
  };

  std::array<Line, kOps> lines_;
  const std::uint32_t generation_ = fork_generation();
};

}  // namespace phalanx
