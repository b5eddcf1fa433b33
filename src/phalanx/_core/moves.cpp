// The ops that move bytes without changing them: barrier, broadcast, all_gather, gather, scatter, all_to_all.
#include <algorithm>

#include "algorithms.hpp"
#include "splits.hpp"

namespace phalanx {

namespace {

void copy(const Blocks& from, std::size_t from_block, const Blocks& to, std::size_t to_block, const Range& range) {
  to.for_runs(to_block, range.offset, range.size, [&](std::byte* data, std::uint64_t run, std::uint64_t done) {
    from.read(from_block, range.offset + done, run, data);
  });
}

// Copies the block of every peer out of its slot, in an order rotated by rank so that not all read the same one first.
template <class Source>
void pull_blocks(Call& call, std::uint64_t tick, Source&& source) {
  for (int i = 1; i < call.size(); ++i) {
    const int peer = (call.rank() + i) % call.size();
    const auto block = static_cast<std::size_t>(peer);
    const Range range = range_of(call, tick, call.request().out.size(block));
    call.request().out.write(block, range.offset, range.size, source(peer));
  }
}

void copy_own(Call& call, std::uint64_t tick, std::size_t from_block, std::size_t to_block) {
  const Request& request = call.request();
  copy(request.in, from_block, request.out, to_block, range_of(call, tick, request.out.size(to_block)));
}

void solo_move(Call& call) {
  const Request& request = call.request();
  if (request.in.empty() || request.out.empty()) return;
  copy(request.in, 0, request.out, 0, {0, request.out.size(0)});
}

void plan_barrier(Call& call) { call.sources = Peers::all; }

void plan_broadcast(Call& call) {
  const Request& request = call.request();
  call.stages = call.is_root();
  call.sources = call.is_root() ? Peers::none : Peers::root;
  plan_ticks(call, (call.is_root() ? request.in : request.out).size(0), 1);
}

void stage_whole(Call& call, std::uint64_t tick) {
  const Range range = range_of(call, tick, call.request().in.size(0));
  call.request().in.read(0, range.offset, range.size, call.slot(call.rank(), tick));
}

void combine_broadcast(Call& call, std::uint64_t tick) {
  if (call.is_root()) return;
  const Range range = range_of(call, tick, call.request().out.size(0));
  call.request().out.write(0, range.offset, range.size, call.slot(call.request().root, tick));
}

void plan_all_gather(Call& call) {
  call.stages = true;
  call.sources = Peers::all;
  plan_ticks(call, call.request().out.largest(), 1);
}

void combine_all_gather(Call& call, std::uint64_t tick) {
  copy_own(call, tick, 0, static_cast<std::size_t>(call.rank()));
  pull_blocks(call, tick, [&](int peer) { return call.slot(peer, tick); });
}

void plan_gather(Call& call) {
  call.stages = !call.is_root();
  call.sources = call.is_root() ? Peers::all : Peers::none;
  call.readers = Peers::root;
  plan_ticks(call, call.request().in.size(0), 1);
}

void combine_gather(Call& call, std::uint64_t tick) {
  if (call.is_root()) combine_all_gather(call, tick);
}

void plan_scatter(Call& call) {
  call.stages = call.is_root();
  call.sources = call.is_root() ? Peers::none : Peers::root;
  plan_ticks(call, call.request().out.size(0), static_cast<std::uint64_t>(call.size()));
}

// One part of the slot for each destination but this rank.
void stage_by_destination(Call& call, std::uint64_t tick) {
  const Blocks& in = call.request().in;
  for (int peer = 0; peer < call.size(); ++peer) {
    if (peer == call.rank()) continue;
    const auto block = static_cast<std::size_t>(peer);
    const Range range = range_of(call, tick, in.size(block));
    in.read(block, range.offset, range.size, part_of_slot(call, call.rank(), tick, peer));
  }
}

void combine_scatter(Call& call, std::uint64_t tick) {
  const Request& request = call.request();
  if (call.is_root()) return copy_own(call, tick, static_cast<std::size_t>(call.rank()), 0);
  const Range range = range_of(call, tick, request.out.size(0));
  request.out.write(0, range.offset, range.size, part_of_slot(call, request.root, tick, call.rank()));
}

// Until the sources have come only the first tick is known to be needed; what they send decides how many there are.
void plan_all_to_all(Call& call) {
  call.stages = true;
  call.sources = Peers::all;
  plan_ticks(call, 0, static_cast<std::uint64_t>(call.size()));
}

std::uint64_t size_sent(const Call& call, int from, int to) { return call.sizes(from)[1 + to]; }

std::uint64_t size_expected(const Call& call, int from, int to) { return call.sizes(to)[1 + call.size() + from]; }

std::uint64_t hash_of_size(int from, int to, std::uint64_t size) {
  std::uint64_t state =
      size * 0x9e3779b97f4a7c15 + (static_cast<std::uint64_t>(from) << 32 | static_cast<std::uint32_t>(to));
  state = (state ^ state >> 30) * 0xbf58476d1ce4e5b9;
  state = (state ^ state >> 27) * 0x94d049bb133111eb;
  return state ^ state >> 31;
}

// What this rank sends less what it expects, as hashes: over all ranks that adds up to nothing where every two of them
// agree. So each rank learns of any two that do not, and reads one number per rank.
std::uint64_t balance_of(const Call& call) {
  std::uint64_t balance = 0;
  for (int peer = 0; peer < call.size(); ++peer) {
    balance += hash_of_size(call.rank(), peer, size_sent(call, call.rank(), peer));
    balance -= hash_of_size(peer, call.rank(), size_expected(call, peer, call.rank()));
  }
  return balance;
}

void stage_all_to_all(Call& call, std::uint64_t tick) {
  if (tick == 0) {
    const Blocks& in = call.request().in;
    const Blocks& out = call.request().out;
    std::uint64_t* sizes = call.sizes(call.rank());
    *sizes++ = in.largest();
    for (std::size_t block = 0; block < in.num(); ++block) *sizes++ = in.size(block);
    for (std::size_t block = 0; block < out.num(); ++block) *sizes++ = out.size(block);
    *sizes = balance_of(call);
  }
  stage_by_destination(call, tick);
}

void fail_by_splits(Call& call) {
  const auto found = find_splits(
      call.size(), [&](int from, int to) { return size_sent(call, from, to); },
      [&](int from, int to) { return size_expected(call, from, to); });
  if (found) call.fail_by_splits(*found);
}

bool meet_all_to_all(Call& call) {
  std::uint64_t largest = 0;
  std::uint64_t balance = 0;
  bool fits = true;
  for (int peer = 0; peer < call.size(); ++peer) {
    largest = std::max(largest, call.sizes(peer)[0]);
    balance += call.sizes(peer)[1 + 2 * call.size()];
    // Compared by themselves, since this rank writes them to its memory.
    fits = fits && size_sent(call, peer, call.rank()) == size_expected(call, peer, call.rank());
  }
  if (!fits || balance != 0) {
    fail_by_splits(call);
    return false;
  }
  plan_ticks(call, largest, static_cast<std::uint64_t>(call.size()));
  return true;
}

void combine_all_to_all(Call& call, std::uint64_t tick) {
  const auto self = static_cast<std::size_t>(call.rank());
  copy_own(call, tick, self, self);
  pull_blocks(call, tick, [&](int peer) { return part_of_slot(call, peer, tick, call.rank()); });
}

}  // namespace

constinit const Algorithm kBarrier{plan_barrier, nullptr, nullptr, nullptr, nullptr, solo_move};
constinit const Algorithm kBroadcast{plan_broadcast, stage_whole, combine_broadcast, nullptr, nullptr, solo_move};
constinit const Algorithm kAllGather{plan_all_gather, stage_whole, combine_all_gather, nullptr, nullptr, solo_move};
constinit const Algorithm kGather{plan_gather, stage_whole, combine_gather, nullptr, nullptr, solo_move};
constinit const Algorithm kScatter{plan_scatter, stage_by_destination, combine_scatter, nullptr, nullptr, solo_move};
constinit const Algorithm kAllToAll{plan_all_to_all, stage_all_to_all, combine_all_to_all,
                                    nullptr,         meet_all_to_all,  solo_move};

}  // namespace phalanx
