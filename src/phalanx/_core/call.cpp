#include "call.hpp"

#include <algorithm>
#include <string>

#include "results.hpp"
#include "signature.hpp"

namespace phalanx {

namespace {

constexpr int kStepsAtOnce = 32;
constexpr std::uint64_t kShapeBits = 0xffff0000;

constexpr std::uint64_t word_of(std::uint64_t seq, std::uint64_t shape, std::uint64_t chain) noexcept {
  return (chain & 0xffffffff00000000) | shape << 16 | (seq & 0xffff);
}

// Whether the word was written for this seq; only 16 bits are kept, so seqs wrap. Words of two ranks that can be
// compared are never that far apart.
constexpr bool is_for(std::uint64_t word, std::uint64_t seq) noexcept {
  return static_cast<std::uint16_t>(word) == static_cast<std::uint16_t>(seq);
}

constexpr bool agree(std::uint64_t one, std::uint64_t other) noexcept { return ((one ^ other) & ~kShapeBits) == 0; }

}  // namespace

void Call::start(Request& request, Clock::time_point now) {
  request_ = &request;
  algorithm_ = &algorithm_of(request.op);
  seq_ = ++history_.seq;
  first_tick_ = history_.tick;
  history_.chain = chain_on(history_.chain, request);
  if (tuning().check == Check::full) {
    history_.chain = mix(mix(history_.chain, request.shape.hash), history_.result);
  }
  posted_ = met_ = failed_ = awaits_ = all_came_ = false;
  met_at_ = now;
  awaited_ = kNoRank;
  agreed_ = !request.is_waited_for || tuning().check != Check::full;
  staged_ = combined_ = done_ = 0;
  ticks = 1;
  chunk = 0;
  stages = finishes = publishes_combined = false;
  sources = Peers::none;
  readers = Peers::all;
  kernel = request.reduce_op >= 0 ? reduce_kernel(request.dtype, static_cast<ReduceOp>(request.reduce_op)) : nullptr;
  algorithm_->plan(*this);
}

Condition Call::condition(Peers peers, Counter counter, std::uint64_t value) const noexcept {
  return {counter, peers == Peers::root ? segment_.seat_of(request_->root) : kEverySeat, value};
}

bool Call::reached(Peers peers, Counter counter, std::uint64_t value) {
  if (peers == Peers::none) return true;
  blocked_on_ = condition(peers, counter, value);
  return lines_.reached(blocked_on_);
}

Advance Call::advance(Clock::time_point now) {
  // Those whom it waited for may have come; if they have not, it will be blocked again.
  if (awaits_) met_at_ = now;
  const Advance outcome = go_on();
  awaits_ = outcome == Advance::blocked && awaits_peers();
  return outcome;
}

bool Call::awaits_peers() noexcept {
  if (!all_came_) all_came_ = lines_.reached({Counter::staged, kEverySeat, first_tick_ + 1});
  if (all_came_ || lines_.reached({Counter::staged, blocked_on_.seat, first_tick_ + 1})) return false;
  if (blocked_on_.seat != kEverySeat) {
    awaited_ = segment_.rank_at(blocked_on_.seat);
  } else {
    awaited_ = size() == 2 ? 1 - rank() : kNoRank;
  }
  return true;
}

Advance Call::go_on() {
  if (size() == 1) {
    algorithm_->solo(*this);
    return Advance::finished;
  }
  if ((!posted_ && !post()) || (!met_ && !meet())) return failed_ ? Advance::failed : Advance::blocked;
  for (int steps = 0; step();) {
    if (++steps == kStepsAtOnce) return Advance::more;
  }
  if (done_ < ticks || (stages && staged_ < ticks)) return Advance::blocked;
  if (!agreed_ && !agreed()) return failed_ ? Advance::failed : Advance::blocked;
  history_.tick = first_tick_ + ticks;
  // The result of the call before has gone into this one's descriptor.
  if (tuning().check == Check::full) history_.result = result_hash();
  segment_.answer(seat()).completed.store(seq_, std::memory_order_release);
  return Advance::finished;
}

// Arrives: with the first tick's data, so that a short call needs no further step from this rank.
bool Call::post() {
  // The ring entry and the slot that this call takes were last used kSlots or more ticks ago.
  if (first_tick_ >= kSlots && !reached(Peers::all, Counter::done, first_tick_ + 1 - kSlots)) return false;
  if (!verify_history()) return false;
  write_descriptor();
  Control& mine = segment_.control(seat());
  const std::uint64_t word = word_of(seq_, request_->shape.hash, history_.chain);
  // Released: whoever makes a report reads the descriptor of those who have not staged anything yet.
  mine.words[seq_ % kRing].store(word, std::memory_order_release);
  // Published with the counter below; nobody looks at it before that.
  mine.latest.store(word, std::memory_order_relaxed);
  if (stages) algorithm_->stage(*this, 0);
  staged_ = 1;
  posted_ = true;
  lines_.publish(Counter::staged, first_tick_ + 1);
  return true;
}

void Call::write_descriptor() noexcept {
  Descriptor& mine = segment_.descriptor(seat(), seq_);
  mine.seq = seq_;
  mine.result = history_.result;
  mine.location = id_of(request_->location);
  mine.call = *request_;
}

std::uint64_t Call::result_hash() const noexcept { return hash_of_result(request_->op, request_->in, request_->out); }

bool Call::meet() {
  if (!reached(sources, Counter::staged, first_tick_ + 1)) return false;
  if (!check_sources()) return false;
  if (algorithm_->meet != nullptr && !algorithm_->meet(*this)) return false;
  met_ = true;
  return true;
}

bool Call::check_sources() noexcept {
  if (sources == Peers::root) return verify(segment_.seat_of(request_->root), seq_);
  if (sources == Peers::all) {
    for (const Seat peer : segment_.seats()) {
      if (!verify(peer, seq_)) return false;
    }
  }
  return true;
}

// A rank that needs nobody (a broadcast's root), or only the root, is done before the others come.
bool Call::agreed() {
  if (!reached(Peers::all, Counter::staged, first_tick_ + 1)) return false;
  for (const Seat peer : segment_.seats()) {
    if (!verify(peer, seq_)) return false;
  }
  return agreed_ = true;
}

bool Call::compare_with_those_who_came() noexcept {
  if (!posted_ || (met_ && agreed_)) return true;
  for (const Seat peer : segment_.seats()) {
    if (lines_.reached({Counter::staged, peer, first_tick_ + 1}) && !verify(peer, seq_)) return false;
  }
  return true;
}

// A rank that waits for nobody (a broadcast's root) compares nothing when it calls. It catches up here: every peer is
// past the tick kSlots before this one, so it has posted the call kSlots before this one, and its word is still there
// because a word is replaced kRing = 2 * kSlots calls later, which needs this rank to be done with it. The hash is a
// running one, so one comparison covers all calls before.
bool Call::verify_history() noexcept {
  if (seq_ <= kSlots) return true;
  const std::uint64_t past = seq_ - kSlots;
  for (const Seat peer : segment_.seats()) {
    if (history_.verified[index_of(peer)] < past && !verify(peer, past)) return false;
  }
  return true;
}

bool Call::verify(Seat peer, std::uint64_t seq) noexcept {
  if (peer == seat() || tuning().check == Check::off) return true;
  const auto& mine = segment_.control(seat()).words;
  const Control& their_control = segment_.control(peer);
  const auto& theirs = their_control.words;
  std::uint64_t& verified = history_.verified[index_of(peer)];
  std::uint64_t their_word = their_control.latest.load(std::memory_order_relaxed);
  if (!is_for(their_word, seq)) their_word = theirs[seq % kRing].load(std::memory_order_relaxed);
  const std::uint64_t my_word = mine[seq % kRing].load(std::memory_order_relaxed);
  if (agree(their_word, my_word)) {
    if (their_word != my_word && seq == seq_) note_shapes(segment_.rank_at(peer));
    verified = seq;
    return true;
  }
  const std::uint64_t oldest = seq >= kRing ? seq - kRing + 1 : 1;
  std::uint64_t first = std::max(verified + 1, oldest);
  for (; first < seq; ++first) {
    const std::uint64_t word = theirs[first % kRing].load(std::memory_order_relaxed);
    if (is_for(word, first) && !agree(word, mine[first % kRing].load(std::memory_order_relaxed))) break;
  }
  fail({segment_.rank_at(peer), first, {}});
  return false;
}

// Same number of elements, another shape: whoever finds it first says so, once a group.
void Call::note_shapes(int peer) noexcept {
  std::atomic<std::uint32_t>& noted = segment_.header().shapes_noted;
  if (noted.load(std::memory_order_relaxed) != 0 || noted.exchange(1, std::memory_order_relaxed) != 0) return;
  const auto side = [&](int rank) -> ShapeNote::Side {
    const Descriptor& call = descriptor(rank);
    return {rank, call.call.shape, lines_.location_text(rank, call.location)};
  };
  lines_.note({seq_, request_->op, {side(std::min(rank(), peer)), side(std::max(rank(), peer))}});
}

void Call::fail_by_splits(const Splits& splits) noexcept {
  fail({splits.receiver == rank() ? splits.sender : splits.receiver, seq_, splits});
}

void Call::fail(const Mismatch& mismatch) noexcept {
  failed_ = true;
  mismatch_ = mismatch;
}

bool Call::has_made(int rank, std::uint64_t seq) const noexcept {
  return is_for(segment_.control(segment_.seat_of(rank)).words[seq % kRing].load(std::memory_order_acquire), seq);
}

bool Call::is_complete(std::uint64_t seq) const noexcept {
  for (int other = 0; other < size(); ++other) {
    if (!has_made(other, seq) && !lines_.gone(other, GaveUp::calls, true)) return false;
  }
  return true;
}

Finding Call::finding() {
  const std::uint64_t seq = mismatch_.seq;
  Finding finding;
  finding.failure.kind = FailureKind::mismatch;
  finding.failure.rank = rank();
  finding.failure.peer = mismatch_.peer;
  finding.failure.seq = seq;
  finding.failure.agreed = seq - 1;
  finding.failure.call = *request_;
  finding.failure.splits = mismatch_.splits;
  finding.testify = [this, seq](std::uint32_t report) {
    for (int witness = 0; witness < size(); ++witness) {
      lines_.testify(report, witness, LaneKind::calls, has_made(witness, seq) ? seq : 0, seq - 1);
    }
  };
  finding.is_complete = [this, seq] { return is_complete(seq); };
  return finding;
}

// One step of the pipeline, the furthest along first so that slots become free early. When none is possible
// blocked_on_ is the condition of the earliest tick that is not behind this rank; its coming true makes a step
// possible, and some rank can always take one: no wait of this kind can last for ever among live ranks.
bool Call::step() {
  if (finishes && done_ < combined_ && reached(Peers::all, Counter::combined, first_tick_ + done_ + 1)) {
    algorithm_->finish(*this, done_);
    lines_.publish(Counter::done, first_tick_ + ++done_);
    return true;
  }
  const Condition finish_blocked = blocked_on_;
  const std::uint64_t may_combine = stages ? staged_ : ticks;
  if (combined_ < may_combine && reached(sources, Counter::staged, first_tick_ + combined_ + 1)) {
    if (algorithm_->combine != nullptr) algorithm_->combine(*this, combined_);
    ++combined_;
    if (publishes_combined) lines_.publish(Counter::combined, first_tick_ + combined_);
    if (!finishes) {
      done_ = combined_;
      lines_.publish(Counter::done, first_tick_ + done_);
    }
    return true;
  }
  const Condition combine_blocked = blocked_on_;
  const std::uint64_t tick = first_tick_ + staged_;
  // The first round through the slots takes over those of earlier calls, which may have had other readers.
  const Peers last_readers = staged_ < kSlots ? Peers::all : readers;
  // This rank reads its own slot, too, and peers may have got done since the looks above.
  const bool done_here = staged_ < done_ + kSlots;
  if (stages && staged_ < ticks && done_here &&
      (tick < kSlots || reached(last_readers, Counter::done, tick + 1 - kSlots))) {
    algorithm_->stage(*this, staged_);
    lines_.publish(Counter::staged, first_tick_ + ++staged_);
    return true;
  }
  if (combined_ < may_combine) blocked_on_ = combine_blocked;
  if (finishes && done_ < combined_) blocked_on_ = finish_blocked;
  return false;
}

}  // namespace phalanx
