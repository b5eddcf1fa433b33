#include "agreement.hpp"

#include <algorithm>
#include <utility>

#include "signature.hpp"

namespace phalanx {

Agreement::Agreement(std::shared_ptr<Member> member, std::function<void()> tell, std::function<void()> wake,
                     Matching matching)
    : member_(std::move(member)),
      tell_(std::move(tell)),
      wake_(std::move(wake)),
      matching_(matching),
      posts_(*member_->segment, member_->rank()),
      calls_(member_->rank(), member_->size()),
      pairs_(static_cast<std::size_t>(member_->size()) * 2),
      comparing_(member_->rank(), member_->size()),
      reporting_(member_->lines) {}

std::uint64_t Agreement::post(const Description& call, const Location* location, std::uint64_t result,
                              std::uint64_t balance) noexcept {
  const std::uint64_t seq = calls_.seq() + 1;
  chain_ = chain_on(chain_, call);
  if (member_->segment->header().tuning.check == Check::full) chain_ = mix(mix(chain_, call.shape.hash), result);
  member_->lines.publish_location(location);
  // Before the number is published: a report reads the call of every rank that has posted it.
  write_entry(member_->segment->post_entry(member_->seat(), LaneKind::calls, seq), seq,
              {seq, result, call, id_of(location), balance});
  const bool agrees = calls_.post(posts_, posted_word(chain_, call.shape.hash));
  if (calls_.other_shape()) note_shapes(calls_.other_shape());
  if (!agrees) {
    keep({calls_.difference()});
    wake_();
  } else if (traits_of(call.op).exchanges_sizes && calls_.have_all_posted() && !sizes_fit(seq)) {
    const int other = member_->rank() == 0 ? 1 : 0;
    keep({.difference = {other, seq - 1, seq}, .sizes_differ = true});
    wake_();
  }
  return seq;
}

// Whether each rank expects of each other one what that one sends. All have posted the call, and it is the last to come
// that looks; where another has replaced its call already, nobody can tell.
bool Agreement::sizes_fit(std::uint64_t seq) const noexcept {
  std::uint64_t sum = 0;
  for (int rank = 0; rank < member_->size(); ++rank) {
    const auto entry = find_collective(rank, seq);
    // 0: that rank could not tell.
    if (!entry || entry->balance == 0) return true;
    sum += entry->balance;
  }
  return sum == 0;
}

Agreement::Pair& Agreement::pair_of(int peer, bool sends) {
  std::atomic<Pair*>& pair = pairs_[pair_index(peer, sends)];
  Pair* const known = pair.load(std::memory_order_relaxed);
  if (known != nullptr) return *known;
  const Seat own = member_->seat(), other = member_->segment->seat_of(peer);
  const Seat from = sends ? own : other, to = sends ? other : own;
  made_pairs_.push_back(std::make_unique<Pair>(*member_->segment, from, to, sends));
  pair.store(made_pairs_.back().get(), std::memory_order_release);
  return *made_pairs_.back();
}

// Added to each message that is not to be compared; odd, and larger than any number of messages can bring back to 0.
constexpr std::uint64_t kUnknown = 0x9e3779b97f4a7c15;

// The word of the next message.
std::uint64_t Agreement::word_of(Pair& messages, const Description& call) const {
  if (matching_ == Matching::by_order) {
    messages.chain = chain_on_message(messages.chain, call);
    return message_word(0, static_cast<std::uint32_t>(messages.chain >> 32));
  }
  const std::uint64_t hash = hash_of_message(call, ++messages.num_of_tag[call.tag]);
  messages.which += hash;
  // The sender's sum has no such term: the two sides never seem to have made the same messages again.
  if (call.op == Op::recv && expects_any_sender_) messages.which += kUnknown;
  messages.what += chain_on_message(hash, call);
  return message_word(static_cast<std::uint32_t>(messages.which >> 32),
                      static_cast<std::uint32_t>(messages.what >> 32));
}

std::uint64_t Agreement::messages_posted(int peer, bool sends) const noexcept {
  const Seat own = member_->seat(), other = member_->segment->seat_of(peer);
  const PairLine& line = member_->segment->pair_line(sends ? other : own, sends ? own : other, sends);
  return line.posted.load(std::memory_order_acquire);
}

std::uint64_t Agreement::post_message(const Description& call, const Location* location) {
  const bool sends = call.op == Op::send;
  Pair& messages = pair_of(call.peer, sends);
  const std::uint64_t seq = messages.posting.seq() + 1;
  member_->lines.publish_location(location);
  ++num_messages_;
  write_entry(member_->segment->post_entry(member_->seat(), LaneKind::messages, num_messages_), num_messages_,
              {seq, 0, call, id_of(location), 0});
  if (!messages.posting.post(messages.posts, word_of(messages, call))) {
    Difference difference = messages.posting.difference();
    difference.peer = call.peer;
    keep({difference, LaneKind::messages, sends});
    wake_();
  }
  return seq;
}

void Agreement::set_completed(std::uint64_t seq) noexcept {
  // Calls may end in another order than they were posted in, and in several threads.
  std::atomic<std::uint64_t>& completed = member_->segment->answer(member_->seat()).completed;
  std::uint64_t known = completed.load(std::memory_order_relaxed);
  while (known < seq &&
         !completed.compare_exchange_weak(known, seq, std::memory_order_release, std::memory_order_relaxed)) {
  }
}

bool Agreement::compare() {
  const std::lock_guard lock(mutex_);
  return compare_locked();
}

bool Agreement::compare_with(int peer) {
  const std::lock_guard lock(mutex_);
  if (has_found() || member_->lines.failed()) return has_found();
  return keep_compared(comparing_.compare_with(posts_, peer)) || has_found();
}

// True: the look that is over has found a difference.
bool Agreement::keep_compared(bool agrees) {
  if (comparing_.other_shape()) note_shapes(comparing_.other_shape());
  if (!agrees) keep({comparing_.difference()});
  return !agrees;
}

bool Agreement::compare_locked() {
  if (has_found() || member_->lines.failed()) return has_found();
  if (keep_compared(comparing_.compare(posts_))) return true;
  for (std::size_t i = 0; i < pairs_.size(); ++i) {
    Pair* const pair = pairs_[i].load(std::memory_order_acquire);
    if (pair == nullptr || pair->comparing.compare(pair->posts)) continue;
    Difference difference = pair->comparing.difference();
    difference.peer = static_cast<std::int32_t>(i / 2);
    keep({difference, LaneKind::messages, i % 2 == 1});
    return true;
  }
  return has_found();
}

// The same number of elements in different shapes: the first rank that finds it says so, once per group.
void Agreement::note_shapes(const OtherShape& other) noexcept {
  std::atomic<std::uint32_t>& noted = member_->segment->header().shapes_noted;
  if (noted.load(std::memory_order_relaxed) != 0) return;
  const int own = member_->rank(), ranks[] = {std::min(own, other.peer), std::max(own, other.peer)};
  const auto one = find_collective(ranks[0], other.seq), two = find_collective(ranks[1], other.seq);
  // Too many calls have been posted since.
  if (!one || !two || noted.exchange(1, std::memory_order_relaxed) != 0) return;
  const auto side = [&](int rank, const PostEntry::Content& call) -> ShapeNote::Side {
    return {rank, call.call.shape, member_->lines.location_text(rank, call.location)};
  };
  member_->lines.note({other.seq, one->call.op, {side(ranks[0], *one), side(ranks[1], *two)}});
}

void Agreement::keep(const Found& found) noexcept {
  if (is_kept_.exchange(true, std::memory_order_acq_rel)) return;
  found_ = found;
  // At once: this rank and its peers go on, and replace what they have posted.
  see_all();
  has_found_.store(true, std::memory_order_release);
}

void Agreement::see_all() {
  seen_.resize(static_cast<std::size_t>(member_->size()));
  for (int rank = 0; rank < member_->size(); ++rank) see(rank);
}

void Agreement::see(int rank) noexcept {
  Seen& seen = seen_[static_cast<std::size_t>(rank)];
  const std::uint64_t seq = found_.difference.seq;
  // Ranks that do not wait may have got further: what matters is what came before.
  const Seat seat = member_->segment->seat_of(rank);
  const std::uint64_t completed = member_->segment->answer(seat).completed.load(std::memory_order_acquire);
  const bool is_call = found_.kind == LaneKind::calls;
  // First: the entry of a number that was seen is there, or was replaced.
  seen.posted = is_call ? posts_.posted(rank) : 0;
  seen.call = find_call(rank);
  seen.completed = find_collective(rank, is_call ? std::min(completed, seq - 1) : completed);
}

std::optional<PostEntry::Content> Agreement::find_collective(int rank, std::uint64_t seq) const noexcept {
  return read_entry(member_->segment->post_entry(member_->segment->seat_of(rank), LaneKind::calls, seq), seq);
}

std::optional<PostEntry::Content> Agreement::find_call(int rank) const noexcept {
  const std::uint64_t seq = found_.difference.seq;
  if (found_.kind == LaneKind::calls) return find_collective(rank, seq);
  const int own = member_->rank(), peer = found_.difference.peer;
  if (rank != own && rank != peer) return std::nullopt;
  const Op op = found_.sends == (rank == own) ? Op::send : Op::recv;
  return find_message(rank, op, rank == own ? peer : own, [&](const auto& other) { return other.seq == seq; });
}

template <class IsIt>
std::optional<PostEntry::Content> Agreement::find_message(int rank, Op op, int peer, IsIt&& is_it) const noexcept {
  const Seat seat = member_->segment->seat_of(rank);
  for (std::uint64_t slot = 0; slot < kPostDepth; ++slot) {
    const PostEntry& entry = member_->segment->post_entry(seat, LaneKind::messages, slot);
    const auto content = read_entry(entry, entry.number.load(std::memory_order_relaxed));
    if (content && content->call.op == op && content->call.peer == peer && is_it(*content)) return content;
  }
  return std::nullopt;
}

std::uint64_t Agreement::find_fitting(int rank, Op op, int peer, const PostEntry::Content& message) const noexcept {
  const auto fits = [&](const PostEntry::Content& other) {
    return other.seq != message.seq && chain_on_message(0, other.call) == chain_on_message(0, message.call);
  };
  const auto found = find_message(rank, op, peer, fits);
  return found ? found->seq : 0;
}

std::string Agreement::place_of(const Description& call, std::uint64_t seq) const {
  const int own = member_->rank();
  const auto entry = is_message(call.op)
                         ? find_message(own, call.op, call.peer, [&](const auto& other) { return other.seq == seq; })
                         : find_collective(own, seq);
  return entry ? member_->lines.location_text(own, entry->location) : std::string();
}

MadeCall Agreement::made_call(int rank, const std::optional<PostEntry::Content>& call) const {
  if (!call) return {};
  MadeCall made{call->seq, call->result, call->call, {}};
  copy_text(made.where, member_->lines.location_text(rank, call->location));
  return made;
}

void Agreement::testify(std::uint32_t report) {
  for (int rank = 0; rank < member_->size(); ++rank) {
    Seen& seen = seen_[static_cast<std::size_t>(rank)];
    // It may have come meanwhile.
    if (found_.kind == LaneKind::calls && seen.posted < found_.difference.seq) see(rank);
    const Seat seat = member_->segment->seat_of(rank);
    Testimony& testimony = member_->segment->testimony(report, seat);
    testimony.call = made_call(rank, seen.call);
    testimony.completed = made_call(rank, seen.completed);
    testimony.posted = seen.posted;
    copy_text(testimony.refused, member_->segment->refusal(seat, found_.kind).text.read());
  }
}

bool Agreement::is_complete() const noexcept {
  if (found_.kind == LaneKind::messages) return true;
  for (int rank = 0; rank < member_->size(); ++rank) {
    const bool has_posted = posts_.posted(rank) >= found_.difference.seq;
    if (!has_posted && !member_->lines.gone(rank, GaveUp::calls, true)) return false;
  }
  return true;
}

// What comparing at rest knows of the finder and the peer. Posting knows of calls only where this rank came last.
std::uint64_t Agreement::agreed_at_rest() const noexcept {
  const Difference& difference = found_.difference;
  std::uint64_t agreed = 0;
  if (found_.kind == LaneKind::calls) {
    agreed = comparing_.agreed_with(difference.peer);
  } else {
    const Pair* const pair = pairs_[pair_index(difference.peer, found_.sends)].load(std::memory_order_acquire);
    if (pair != nullptr) agreed = pair->comparing.agreed_with(found_.sends ? 1 : 0);
  }
  return agreed < difference.seq ? agreed : 0;
}

Finding Agreement::finding() {
  const Difference& difference = found_.difference;
  const int own = member_->rank();
  Finding finding;
  Failure& failure = finding.failure;
  failure.kind = FailureKind::mismatch;
  failure.rank = own;
  failure.peer = difference.peer;
  failure.seq = difference.seq;
  failure.agreed = std::max(difference.agreed, agreed_at_rest());
  failure.sizes_differ = found_.sizes_differ ? 1 : 0;
  if (found_.kind == LaneKind::messages) {
    // As of a message that does not fit its receive: the receiver is the finder.
    failure.kind = FailureKind::message;
    if (found_.sends) std::swap(failure.rank, failure.peer);
    const auto &sent = seen_[static_cast<std::size_t>(failure.peer)].call,
               &received = seen_[static_cast<std::size_t>(failure.rank)].call;
    const MadeCall made = made_call(failure.peer, sent);
    Misfit& misfit = failure.misfit;
    misfit.sent = made.description;
    copy_text(misfit.where, made.where);
    const bool counts_order = matching_ == Matching::by_order;
    if (received && counts_order) misfit.fitting_seq = find_fitting(failure.peer, Op::send, failure.rank, *received);
    if (sent && counts_order && misfit.fitting_seq == 0) {
      misfit.fitting_seq = find_fitting(failure.rank, Op::recv, failure.peer, *sent);
      misfit.is_sent_fitting = 1;
    }
  }
  const auto& own_call = seen_[static_cast<std::size_t>(failure.rank)].call;
  const MadeCall called = made_call(failure.rank, own_call);
  failure.call = called.description;
  copy_text(failure.where, called.where);
  // One that is far ahead has replaced its call. That of the rank behind says at least what this is about.
  const auto& other_call = seen_[static_cast<std::size_t>(difference.peer)].call;
  if (found_.kind == LaneKind::calls && !own_call && other_call) failure.call = other_call->call;
  finding.testify = [this](std::uint32_t report) { testify(report); };
  finding.is_complete = [this] { return is_complete(); };
  return finding;
}

bool Agreement::advance(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  return advance_locked(now);
}

bool Agreement::advance_locked(Clock::time_point now) {
  if (was_told()) return true;
  if (!member_->lines.failed()) {
    if (!reporting_.is_under_way()) {
      if (!has_found()) return false;
      reporting_.begin(finding(), now);
    }
    if (!reporting_.advance(now)) return false;
  }
  reporting_.forget();
  was_told_.store(true, std::memory_order_release);
  tell_();
  return true;
}

bool Agreement::report_now(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (!advance_locked(now)) reporting_.hurry(now);
  return advance_locked(now);
}

void Agreement::fail(const Failure& failure, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (advance_locked(now) || has_found()) {
    reporting_.hurry(now);
  } else if (!is_kept_.exchange(true, std::memory_order_acq_rel)) {
    found_.difference = {failure.peer, failure.seq == 0 ? 0 : failure.seq - 1, failure.seq};
    found_.kind = is_message(failure.call.op) ? LaneKind::messages : LaneKind::calls;
    found_.sends = failure.call.op == Op::send;
    see_all();
    reporting_.begin({failure, [this](std::uint32_t report) { testify(report); }}, now);
  }
  advance_locked(now);
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
  if (!was_told()) compare();
  if (!advance(now)) {
    sleep.bells.push_back(bell);
    // All groups of the process at the same times.
    const auto since_epoch = now.time_since_epoch();
    const auto next = Clock::time_point(since_epoch - since_epoch % kBetweenComparisons + kBetweenComparisons);
    sleep.until = std::min(sleep.until, has_found() ? now + Reporting::kBetweenLooks : next);
  }
  return Tended::done;
}

}  // namespace phalanx
