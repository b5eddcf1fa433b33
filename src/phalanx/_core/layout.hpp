// What lies where in a group's segment. Plain data and atomics only, the same in every process that maps it.
//
//   Header | Control[size] | WaitLine[size] | Descriptor[size][kRing] | u64 sizes[size][kRing][size + 1] |
//   staging[size]
//
// Ownership: every Control, WaitLine, Descriptor, sizes and staging area has one writer, its rank. The Header's
// immutable part is written by the creator before anyone maps it; the rest is shared and atomic.
//
// Time is counted in ticks. Every collective takes the same number of ticks (at least one) on every rank, so all ranks
// number them alike. In tick t a rank uses its staging slot t % kSlots. The counters say how many ticks a rank has
// staged, combined and done; a slot, a ring word and a descriptor are reused only when every reader is done with them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace phalanx {

inline constexpr std::uint64_t kMagic = 0x31584e414c414850;  // "PHALANX1"
inline constexpr std::uint32_t kVersion = 1;
inline constexpr int kSlots = 4;
// Twice the slots: a peer that lags by kSlots ticks still finds its word when it compares (see Call::verify_history).
inline constexpr int kRing = 2 * kSlots;
inline constexpr std::size_t kLine = 128;
inline constexpr std::size_t kPage = 4096;
inline constexpr int kMaxRanks = 1024;

enum class Op : std::uint8_t {
  barrier = 0,
  all_reduce = 1,
  reduce = 2,
  broadcast = 3,
  all_gather = 4,
  gather = 5,
  scatter = 6,
  reduce_scatter = 7,
  all_to_all = 8,
};
inline constexpr int kNumOps = 9;

enum class FailureKind : std::uint32_t { none = 0, mismatch = 1, timeout = 2, aborted = 3, left = 4 };

// The first failure of a group, frozen by whoever found it. Written between state 1 (claimed) and 2 (published).
struct Failure {
  FailureKind kind;
  std::int32_t rank;  // who found it
  std::int32_t peer;  // the other side of a mismatch; the rank that left
  std::uint32_t num_missing;
  std::uint64_t seq;
  std::int32_t missing[32];  // the first of them
  char text[256];
};

// Choices that all ranks must make alike, made once by the creator.
struct Tuning {
  std::uint64_t slot_bytes;      // capacity of a staging slot
  std::uint64_t chunk_bytes;     // bytes of a slot that a tick of a long call uses
  std::uint64_t one_shot_bytes;  // an all_reduce up to this size takes one tick in which every rank reduces all
  std::uint32_t crowded;         // more ranks than CPUs: a waiter lends its CPU instead of spinning
  std::uint32_t spin_us;         // how long a waiter spins or lends before it sleeps
};

struct Header {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t size;
  std::uint8_t nonce[16];
  std::uint64_t total_bytes;
  Tuning tuning;

  alignas(kLine) std::atomic<std::uint32_t> bell;  // futex word; changes when a sleeper's condition may have come true
  std::atomic<std::uint32_t> sleepers;

  alignas(kLine) std::atomic<std::uint32_t> failure_state;  // 0 none, 1 claimed, 2 published
  Failure failure;
};

struct alignas(kLine) Control {
  // Ring by seq: low 32 bits the seq, high 32 bits the running hash of all signatures up to it.
  std::atomic<std::uint64_t> words[kRing];
  std::atomic<std::uint64_t> counters[3];  // by Counter
  std::atomic<std::uint32_t> left;         // 1: this rank has left the group in order
  std::atomic<std::uint32_t> claimed;      // 1: a process is this rank
  std::atomic<std::uint32_t> cpu;          // where this rank last published, plus 1; a hint
};

// What a sleeping rank waits for, so that only the publisher that completes it rings the bell.
struct alignas(kLine) WaitLine {
  std::atomic<std::uint32_t> counter;  // 0: not asleep; else Counter + 1
  std::atomic<std::int32_t> peer;
  std::atomic<std::uint64_t> value;
};

// A call's signature in full, to explain a mismatch, and what each rank may choose for itself (the factor).
struct alignas(64) Descriptor {
  std::uint64_t seq;
  std::int64_t count;
  double factor;
  std::int32_t root;
  std::uint32_t layout;
  std::uint8_t op;
  std::int8_t reduce_op;
  std::uint8_t dtype;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(Header) <= kPage);
static_assert(sizeof(Control) == kLine);
static_assert(sizeof(WaitLine) == kLine);
static_assert(sizeof(Descriptor) == 64);
static_assert(std::is_trivially_destructible_v<Header>);

// The smallest slot that has room for a piece of its own for every rank.
constexpr std::size_t smallest_slot(int size) {
  return static_cast<std::size_t>(size) * 64 > kPage ? static_cast<std::size_t>(size) * 64 : kPage;
}

constexpr std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// Byte offsets of the areas for a given number of ranks.
struct Offsets {
  std::size_t control, wait, descriptors, sizes, sizes_stride, staging, staging_stride, total;

  constexpr Offsets(int size, std::size_t slot_bytes)
      : control(kPage),
        wait(control + static_cast<std::size_t>(size) * sizeof(Control)),
        descriptors(wait + static_cast<std::size_t>(size) * sizeof(WaitLine)),
        sizes(descriptors + static_cast<std::size_t>(size) * kRing * sizeof(Descriptor)),
        sizes_stride(round_up(static_cast<std::size_t>(size + 1) * sizeof(std::uint64_t), kLine)),
        staging(round_up(sizes + static_cast<std::size_t>(size) * kRing * sizes_stride, kPage)),
        staging_stride(round_up(slot_bytes * kSlots, kPage)),
        total(staging + static_cast<std::size_t>(size) * staging_stride) {}
};

}  // namespace phalanx
