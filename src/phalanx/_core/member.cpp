#include "member.hpp"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace phalanx {

namespace {

int checked(int rank, int size) {
  if (rank < 0 || rank >= size) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " is not in a group of " + std::to_string(size));
  }
  return rank;
}

}  // namespace

Member::Member(std::shared_ptr<Segment> shared, int rank)
    : segment(std::move(shared)), lines(*segment, checked(rank, segment->size())) {
  if (segment->control(rank).claimed.exchange(1, std::memory_order_relaxed) != 0) {
    throw std::runtime_error("rank " + std::to_string(rank) + " of this group is taken by another process");
  }
}

void Member::report_timeout(Op op, std::uint64_t seq, const std::vector<int>& missing) {
  report_timeout(op, seq, missing, -1, 0, "");
}

void Member::report_timeout(Op op, std::uint64_t seq, const std::vector<int>& missing, int peer, std::uint32_t tag,
                            const std::string& others) {
  Failure failure{};
  failure.kind = FailureKind::timeout;
  failure.rank = rank();
  failure.peer = peer;
  failure.misfit.tag = tag;
  std::snprintf(failure.text, sizeof(failure.text), "%s", others.c_str());
  failure.op = op;
  failure.seq = seq;
  failure.num_missing = static_cast<std::uint32_t>(missing.size());
  std::copy_n(missing.begin(), std::min(missing.size(), std::size(failure.missing)), failure.missing);
  lines.fail(failure);
}

void Member::report_gone(Op op, std::uint64_t seq, int peer) {
  // A peer that has given up did so because of a failure that is there already.
  if (lines.failed()) return;
  Failure failure = lines.describe_gone(peer);
  failure.op = op;
  failure.seq = seq;
  lines.fail(failure);
}

void Member::report_abort(std::uint64_t seq, const std::string& text) {
  Failure failure{};
  failure.kind = FailureKind::aborted;
  failure.rank = rank();
  failure.peer = -1;
  failure.seq = seq;
  std::snprintf(failure.text, sizeof(failure.text), "%s", text.c_str());
  lines.abort(failure);
}

}  // namespace phalanx
