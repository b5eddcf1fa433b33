#include "agreement.hpp"

#include <algorithm>
#include <utility>

#include "signature.hpp"

namespace phalanx {

Agreement::Agreement(std::shared_ptr<Member> member, std::function<void()> tell)
    : member_(std::move(member)),
      tell_(std::move(tell)),
      posts_(*member_->segment, member_->rank()),
      calls_(member_->rank(), member_->size()),
      seen_(static_cast<std::size_t>(member_->size())),
      reporting_(member_->lines) {}

std::uint64_t Agreement::post(const Description& call, const Location* location) noexcept {
  const std::uint64_t seq = calls_.seq() + 1;
  chain_ = chain_on(chain_, call);
  member_->lines.place(location);
  // Before the number is published: a report reads the call of whoever has posted it.
  write_entry(member_->segment->post_entry(member_->seat(), LaneKind::calls, seq), seq, {seq, call, id_of(location)});
  if (!calls_.post(posts_, chain_)) keep({calls_.difference(), call, location, LaneKind::calls});
  return seq;
}

std::uint64_t Agreement::post_message(const Description& call, const Location* location) {
  const Seat own = member_->seat();
  const bool sends = call.op == Op::send;
  auto pair = pairs_.find({call.peer, sends});
  if (pair == pairs_.end()) {
    const Seat peer = member_->segment->seat_of(call.peer);
    const Seat from = sends ? own : peer, to = sends ? peer : own;
    pair = pairs_.try_emplace({call.peer, sends}, *member_->segment, from, to, sends).first;
  }
  Pair& messages = pair->second;
  const std::uint64_t seq = messages.posting.seq() + 1;
  messages.chain = chain_on_message(messages.chain, call);
  member_->lines.place(location);
  ++num_messages_;
  write_entry(member_->segment->post_entry(own, LaneKind::messages, num_messages_), num_messages_,
              {seq, call, id_of(location)});
  if (!messages.posting.post(messages.posts, messages.chain)) {
    Difference difference = messages.posting.difference();
    difference.peer = call.peer;
    keep({difference, call, location, LaneKind::messages});
  }
  return seq;
}

void Agreement::keep(const Found& found) noexcept {
  if (has_found()) return;
  found_ = found;
  // At once: this rank and its peers go on, and replace what they have posted.
  for (int rank = 0; rank < member_->size(); ++rank) {
    const std::uint64_t posted = found_.kind == LaneKind::calls ? posts_.posted(rank) : 0;
    seen_[static_cast<std::size_t>(rank)] = {find_call(rank), posted};
  }
  has_found_.store(true, std::memory_order_release);
  progress().wake(true);
}

std::optional<PostEntry::Content> Agreement::find_call(int rank) const noexcept {
  const std::uint64_t seq = found_.difference.seq;
  const Seat seat = member_->segment->seat_of(rank);
  if (found_.kind == LaneKind::calls) {
    return read_entry(member_->segment->post_entry(seat, LaneKind::calls, seq), seq);
  }
  const int own = member_->rank(), peer = found_.difference.peer;
  if (rank != own && rank != peer) return std::nullopt;
  const Op op = (found_.call.op == Op::send) == (rank == own) ? Op::send : Op::recv;
  for (std::uint64_t slot = 0; slot < kPostDepth; ++slot) {
    const PostEntry& entry = member_->segment->post_entry(seat, LaneKind::messages, slot);
    const auto content = read_entry(entry, entry.number.load(std::memory_order_relaxed));
    const bool is_it =
        content && content->seq == seq && content->call.op == op && content->call.peer == (rank == own ? peer : own);
    if (is_it) return content;
  }
  return std::nullopt;
}

void Agreement::testify(std::uint32_t report, int rank) const {
  const Seat seat = member_->segment->seat_of(rank);
  Testimony& testimony = member_->segment->testimony(report, seat);
  testimony.call = testimony.completed = {};
  const Seen& seen = seen_[static_cast<std::size_t>(rank)];
  if (seen.call) {
    testimony.call = {seen.call->seq, 0, seen.call->call, {}};
    copy_text(testimony.call.where, member_->lines.location_text(rank, seen.call->location));
  }
  testimony.posted = seen.posted;
  copy_text(testimony.refused, member_->segment->refusal(seat, found_.kind).text.read());
}

Finding Agreement::finding() {
  Finding finding;
  finding.failure.kind = FailureKind::mismatch;
  finding.failure.rank = member_->rank();
  finding.failure.peer = found_.difference.peer;
  finding.failure.seq = found_.difference.seq;
  finding.failure.agreed = found_.difference.agreed;
  finding.failure.call = found_.call;
  copy_text(finding.failure.where, text_of(found_.location));
  finding.testify = [this](std::uint32_t report) {
    for (int rank = 0; rank < member_->size(); ++rank) testify(report, rank);
  };
  return finding;
}

bool Agreement::advance(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (was_told()) return true;
  if (!member_->lines.failed()) {
    if (!has_found()) return false;
    if (!reporting_.is_under_way()) reporting_.begin(finding(), now);
    if (!reporting_.advance(now)) return false;
  }
  reporting_.forget();
  was_told_.store(true, std::memory_order_release);
  tell_();
  return true;
}

void Agreement::report_until(Clock::time_point until) {
  while (has_found() && !advance(Clock::now()) && Clock::now() < until) {
    member_->lines.nap(std::min(until, Clock::now() + Reporting::kBetweenLooks));
  }
}

Agreement::Tended Agreement::tend(bool, Sleep& sleep) {
  // Before the look: a failure that comes after it changes the bell.
  const Bell bell = member_->lines.bell();
  const auto now = Clock::now();
  if (!advance(now)) {
    sleep.bells.push_back(bell);
    if (has_found()) sleep.until = std::min(sleep.until, now + Reporting::kBetweenLooks);
  }
  return Tended::done;
}

}  // namespace phalanx
