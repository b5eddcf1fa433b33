#include "member.hpp"

#include <stdexcept>
#include <utility>

#include "listener.hpp"
#include "ticket.hpp"

namespace phalanx {

namespace {

int checked(int rank, int size) {
  if (rank < 0 || rank >= size) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " is not in a group of " + std::to_string(size));
  }
  return rank;
}

void set_doing(Failure& failure, const Member::Doing& doing) {
  failure.call = doing.call;
  failure.seq = doing.seq;
  copy_text(failure.where, text_of(doing.location));
}

}  // namespace

Member::Member(std::shared_ptr<Segment> shared, int rank)
    : segment(std::move(shared)), lines(*segment, checked(rank, segment->size())), refusals(*segment, rank) {
  if (segment->control(seat()).claimed.exchange(1, std::memory_order_relaxed) != 0) {
    throw std::runtime_error("rank " + std::to_string(rank) + " of this group is taken by another process");
  }
}

Failure Member::timeout_of(const Doing& doing, const std::vector<int>& missing,
                           const std::set<std::uint32_t>& other_tags) const {
  Failure failure;
  failure.kind = FailureKind::timeout;
  failure.rank = rank();
  set_doing(failure, doing);
  failure.asked = doing.asked ? 1 : 0;
  for (const int rank : missing) failure.add_missing(rank);
  for (const std::uint32_t tag : other_tags) failure.add_other_tag(tag);
  return failure;
}

void Member::ask_missing(Ticket& ticket, const std::vector<int>& missing) const noexcept {
  ticket.asked = true;
  for (const int peer : missing) {
    if (peer != rank()) ask(*segment, segment->seat_of(peer));
  }
}

Failure Member::end_of(int peer, const Doing& doing) const {
  Failure failure = lines.describe_gone(peer);
  set_doing(failure, doing);
  return failure;
}

std::vector<Testimony> Member::testimonies() const {
  std::vector<Testimony> all;
  const std::uint32_t report = lines.report();
  for (int rank = 0; rank < size(); ++rank) all.push_back(segment->testimony(report, segment->seat_of(rank)));
  return all;
}

void Member::keep_records(std::shared_ptr<BlackBox> new_box, std::uint32_t group, const std::string& path) {
  if (new_box->forked()) return;
  box_group = group;
  box = std::move(new_box);
  last_location = nullptr;
  location_text_in_box = 0;
  // One that does not fit is not known to peers, rather than wrong.
  auto& known = segment->answer(seat()).box;
  known.write(path.size() <= known.kRoom ? path : "");
}

std::string Member::identity() const {
  constexpr std::size_t kBytes = 8;
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < kBytes; ++i) {
    const std::uint8_t byte = segment->header().nonce[i];
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

void Member::blame(const Ticket& ticket, Result result) const {
  if (box && (result == Result::failed || result == Result::was_broken) && lines.failed()) {
    ticket.entry.blame(lines.failure());
  }
}

void Member::abort(std::uint64_t seq, const std::string& reason) {
  Failure failure;
  failure.kind = FailureKind::aborted;
  failure.rank = rank();
  failure.seq = seq;
  copy_text(failure.reason, reason);
  lines.let_nobody_wait();
  Reporting reporting(lines);
  reporting.begin({failure}, Clock::now());
  while (!reporting.advance(Clock::now())) reporting.nap(Clock::time_point::max());
}

}  // namespace phalanx
