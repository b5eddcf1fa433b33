// The ops that reduce: all_reduce, reduce, reduce_scatter. Every element is reduced by one call of a kernel over all
// sources in rank order, whatever the path, so that all paths give the same bits.
//
// Short all_reduce and reduce take one shot: everybody stages all, then whoever needs the result reduces all. Longer
// ones take two: in each chunk rank r reduces the r-th slice of all ranks into its own slot, and the slices are copied
// out from there. A rank's own input is read where it is, unless it is scattered over several tensors.
#include <algorithm>
#include <vector>

#include "algorithms.hpp"

namespace phalanx {

namespace {

// Calls the kernel with one source a rank: `source(peer)` for peers, `own` for this rank.
template <class Source>
void reduce_into(const Call& call, std::byte* to, std::uint64_t bytes, const std::byte* own, Source&& source) {
  if (bytes == 0) return;
  thread_local std::vector<const void*> sources;
  thread_local std::vector<double> factors;
  const auto size = static_cast<std::size_t>(call.size());
  sources.resize(size);
  factors.resize(size);
  const bool scaled = call.request().reduce_op == static_cast<int>(ReduceOp::premul_sum);
  for (int peer = 0; peer < call.size(); ++peer) {
    const auto i = static_cast<std::size_t>(peer);
    sources[i] = peer == call.rank() ? own : source(peer);
    if (scaled) factors[i] = call.descriptor(peer).call.factor;
  }
  call.kernel(to, sources.data(), size, bytes / element_size(call.request().dtype), factors.data(), nullptr);
}

void solo_reduce(Call& call) {
  const Request& request = call.request();
  request.out.for_runs(0, 0, request.out.size(0), [&](std::byte* data, std::uint64_t run, std::uint64_t done) {
    request.in.read(0, done, run, data);
    const void* source = data;
    call.kernel(data, &source, 1, run / element_size(request.dtype), &request.factor, nullptr);
  });
}

bool one_shot(const Call& call) { return call.request().in.size(0) <= call.tuning().one_shot_bytes; }

// Slice `rank` of a chunk of `size` bytes, as a range within the chunk.
Range slice_of(const Call& call, int rank, std::uint64_t size) {
  const auto ranks = static_cast<std::uint64_t>(call.size());
  const std::uint64_t slice = round_up((size + ranks - 1) / ranks, kChunkUnit);
  const std::uint64_t offset = std::min(static_cast<std::uint64_t>(rank) * slice, size);
  return {offset, std::min(slice, size - offset)};
}

void plan_two_shots(Call& call) {
  call.sources = Peers::all;
  call.publishes_combined = true;
  plan_ticks(call, call.request().in.size(0), 1);
}

void plan_all_reduce(Call& call) {
  call.stages = true;
  if (one_shot(call)) {
    call.sources = Peers::all;
    return;
  }
  plan_two_shots(call);
  call.finishes = true;
}

void plan_reduce(Call& call) {
  if (one_shot(call)) {
    call.stages = !call.is_root();
    call.sources = call.is_root() ? Peers::all : Peers::none;
    call.readers = Peers::root;
    return;
  }
  call.stages = true;
  plan_two_shots(call);
  call.finishes = call.is_root();
}

void stage_reduce(Call& call, std::uint64_t tick) {
  const Blocks& in = call.request().in;
  std::byte* slot = call.slot(call.rank(), tick);
  if (one_shot(call)) return in.read(0, 0, in.size(0), slot);
  const Range chunk = range_of(call, tick, in.size(0));
  const Range own = slice_of(call, call.rank(), chunk.size);
  const std::uint64_t after = own.offset + own.size;
  if (in.direct(0, chunk.offset + own.offset, own.size) == nullptr) return in.read(0, chunk.offset, chunk.size, slot);
  in.read(0, chunk.offset, own.offset, slot);
  in.read(0, chunk.offset + after, chunk.size - after, slot + after);
}

void combine_reduce(Call& call, std::uint64_t tick) {
  const Request& request = call.request();
  if (one_shot(call)) {
    if (request.out.empty()) return;
    request.out.for_runs(0, 0, request.out.size(0), [&](std::byte* data, std::uint64_t run, std::uint64_t done) {
      const std::byte* own = request.in.direct(0, done, run);
      if (own == nullptr) own = call.slot(call.rank(), tick) + done;
      reduce_into(call, data, run, own, [&](int peer) { return call.slot(peer, tick) + done; });
    });
    return;
  }
  const Range chunk = range_of(call, tick, request.in.size(0));
  const Range slice = slice_of(call, call.rank(), chunk.size);
  std::byte* result = call.slot(call.rank(), tick) + slice.offset;
  const std::byte* own = request.in.direct(0, chunk.offset + slice.offset, slice.size);
  reduce_into(call, result, slice.size, own != nullptr ? own : result,
              [&](int peer) { return call.slot(peer, tick) + slice.offset; });
}

void finish_reduce(Call& call, std::uint64_t tick) {
  const Blocks& out = call.request().out;
  const Range chunk = range_of(call, tick, out.size(0));
  for (int i = 0; i < call.size(); ++i) {
    const int peer = (call.rank() + i) % call.size();
    const Range slice = slice_of(call, peer, chunk.size);
    out.write(0, chunk.offset + slice.offset, slice.size, call.slot(peer, tick) + slice.offset);
  }
}

void plan_reduce_scatter(Call& call) {
  call.stages = true;
  call.sources = Peers::all;
  plan_ticks(call, call.request().in.largest(), static_cast<std::uint64_t>(call.size()));
}

void stage_reduce_scatter(Call& call, std::uint64_t tick) {
  const Blocks& in = call.request().in;
  for (int peer = 0; peer < call.size(); ++peer) {
    const auto block = static_cast<std::size_t>(peer);
    const Range range = range_of(call, tick, in.size(block));
    if (peer == call.rank() && in.direct(block, range.offset, range.size) != nullptr) continue;
    in.read(block, range.offset, range.size, part_of_slot(call, call.rank(), tick, peer));
  }
}

void combine_reduce_scatter(Call& call, std::uint64_t tick) {
  const Request& request = call.request();
  const auto block = static_cast<std::size_t>(call.rank());
  const Range range = range_of(call, tick, request.in.size(block));
  const std::byte* own = request.in.direct(block, range.offset, range.size);
  if (own == nullptr) own = part_of_slot(call, call.rank(), tick, call.rank());
  request.out.for_runs(0, range.offset, range.size, [&](std::byte* data, std::uint64_t run, std::uint64_t done) {
    reduce_into(call, data, run, own + done,
                [&](int peer) { return part_of_slot(call, peer, tick, call.rank()) + done; });
  });
}

}  // namespace

constinit const Algorithm kAllReduce{plan_all_reduce, stage_reduce, combine_reduce,
                                     finish_reduce,   nullptr,      solo_reduce};
constinit const Algorithm kReduce{plan_reduce, stage_reduce, combine_reduce, finish_reduce, nullptr, solo_reduce};
constinit const Algorithm kReduceScatter{
    plan_reduce_scatter, stage_reduce_scatter, combine_reduce_scatter, nullptr, nullptr, solo_reduce};

const Algorithm& algorithm_of(Op op) noexcept {
  // Messages have none.
  static constexpr const Algorithm* kByOp[kNumOps] = {&kBarrier, &kAllReduce, &kReduce,        &kBroadcast, &kAllGather,
                                                      &kGather,  &kScatter,   &kReduceScatter, &kAllToAll,  nullptr,
                                                      nullptr,   &kAllGather, &kAllGather};
  return *kByOp[static_cast<std::size_t>(op)];
}

}  // namespace phalanx
