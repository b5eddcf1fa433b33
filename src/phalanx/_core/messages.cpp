#include "messages.hpp"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

namespace phalanx {

namespace {

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

// The send of which the envelope tells.
Description described(const Envelope& envelope, int receiver) noexcept {
  Description call;
  call.op = Op::send;
  call.dtype = static_cast<DType>(envelope.dtype);
  call.unlisted_dtype = envelope.unlisted_dtype;
  call.count = envelope.count;
  call.peer = receiver;
  call.tag = envelope.tag;
  call.flags = envelope.flags;
  return call;
}

}  // namespace

Messages::Messages(std::shared_ptr<Member> member)
    : Lane(member->lines),
      member_(std::move(member)),
      segment_(*member_->segment),
      rank_(member_->rank()),
      seat_(member_->seat()),
      chunk_bytes_(segment_.header().tuning.message_chunk_bytes),
      patience_(segment_.header().tuning),
      out_(at(member_->size())),
      in_(at(member_->size())),
      num_sent_(at(member_->size())),
      num_received_(at(member_->size()) + 1) {}

void Messages::submit(TicketPtr ticket) {
  const TicketPtr mine = ticket;
  {
    const std::lock_guard lock(mutex_);
    auto& numbers = mine->sends() ? num_sent_ : num_received_;
    const std::uint64_t seq = ++numbers[mine->call.peer == kAnySource ? numbers.size() - 1 : at(mine->call.peer)];
    ticket->seq.store(seq, std::memory_order_relaxed);
    ticket->entry.number(seq);
    ticket->began = ticket->made;
    ticket->entry.start(ticket->made);
    count_begin();
    submitted_.push_back(std::move(ticket));
    any_submitted_.store(true, std::memory_order_release);
  }
  hand_over(*mine, true);
  // Nobody tends the lane of a rank that has left, and leave() may have swept it just before.
  if (member_->has_left()) sweep();
}

void Messages::give_up_if_idle() noexcept {
  if (!idle() || !member_->lines.failed()) return;
  gave_up_.store(true, std::memory_order_release);
  member_->lines.give_up(GaveUp::messages);
}

void Messages::end(const TicketPtr& ticket, Result result) {
  const auto now = Clock::now();
  count_end();
  member_->blame(*ticket, result);
  member_->statistics->add(ticket->call.op, ticket->cost(result, ticket->data.size, now));
  ticket->end(result, now);
  give_up_if_idle();
}

bool Messages::go_on(Clock::time_point now, int most_chunks) {
  now_ = now;
  if (reporting_.is_under_way()) return go_on_reporting(now);
  if (any_submitted_.load(std::memory_order_acquire)) take_submitted();
  bool did = false;
  for (int peer = 0; peer < member_->size(); ++peer) {
    if (!out_[at(peer)].empty()) did = send_to(peer, most_chunks) || did;
    if (listens_to(peer) || !in_[at(peer)].empty()) did = receive_from(peer, most_chunks) || did;
  }
  return did;
}

void Messages::take_submitted() {
  std::vector<TicketPtr> submitted;
  {
    const std::lock_guard lock(mutex_);
    submitted.swap(submitted_);
    any_submitted_.store(false, std::memory_order_relaxed);
  }
  for (TicketPtr& ticket : submitted) {
    soonest_ = std::min(soonest_, ticket->deadline);
    // One that was handed over before its maker could hear of the failure is as good as those that were under way.
    if (member_->has_left()) {
      end(ticket, Result::left);
    } else if (member_->lines.failed() &&
               (gave_up_.load(std::memory_order_acquire) || member_->lines.failed_for_all())) {
      end(ticket, Result::was_broken);
    } else if (ticket->call.peer != kAnySource && out_[at(ticket->call.peer)].given_up) {
      end(ticket, Result::failed);
    } else if (ticket->sends()) {
      out_[at(ticket->call.peer)].waiting.push_back(std::move(ticket));
    } else if (!find_arrived(ticket)) {
      ++(ticket->call.peer == kAnySource ? num_posted_any_ : in_[at(ticket->call.peer)].num_posted);
      posted_.push_back(std::move(ticket));
    }
  }
}

// A message that came before its receive.
bool Messages::find_arrived(const TicketPtr& ticket) {
  const int size = member_->size();
  for (int i = 0; i < size; ++i) {
    const int from = ticket->call.peer == kAnySource ? (first_source_ + i) % size : ticket->call.peer;
    if (ticket->call.peer == kAnySource && from == rank_) continue;
    auto& arrived = in_[at(from)].arrived;
    const auto found = std::find_if(arrived.begin(), arrived.end(),
                                    [&](const auto& message) { return message->envelope.tag == ticket->call.tag; });
    if (found != arrived.end()) {
      const std::unique_ptr<Arrived> message = std::move(*found);
      arrived.erase(found);
      accept(from, message->number, message->envelope, ticket);
      return true;
    }
    if (ticket->call.peer != kAnySource) return false;
  }
  return false;
}

Messages::TicketPtr Messages::find_posted(int from, std::uint32_t tag) {
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const TicketPtr& ticket) {
    return (ticket->call.peer == from || (ticket->call.peer == kAnySource && from != rank_)) && ticket->call.tag == tag;
  });
  if (found == posted_.end()) return nullptr;
  TicketPtr ticket = std::move(*found);
  posted_.erase(found);
  --(ticket->call.peer == kAnySource ? num_posted_any_ : in_[at(from)].num_posted);
  return ticket;
}

// The message and its receive have found each other.
void Messages::accept(int from, std::uint64_t number, const Envelope& envelope, const TicketPtr& ticket) {
  ticket->source.store(from, std::memory_order_relaxed);
  ticket->met = now_;
  if (ticket->call.peer == kAnySource) {
    first_source_ = (from + 1) % member_->size();
    ticket->entry.came_from(from);
  }
  const MessageContent sent{static_cast<DType>(envelope.dtype), envelope.unlisted_dtype, envelope.count};
  if (sent != content_of(ticket->call) || envelope.bytes != ticket->data.size) {
    Failure failure;
    failure.kind = FailureKind::message;
    failure.rank = rank_;
    failure.peer = from;
    failure.call = ticket->call;
    failure.seq = ticket->seq.load(std::memory_order_relaxed);
    copy_text(failure.where, text_of(ticket->location));
    failure.misfit.sent = described(envelope, rank_);
    copy_text(failure.misfit.where, member_->lines.location_text(from, envelope.location));
    const auto testify = [this](std::uint32_t report) {
      for (int rank = 0; rank < member_->size(); ++rank)
        member_->lines.testify(report, rank, LaneKind::messages, 0, UINT64_MAX);
    };
    ending_.emplace_back(ticket, Result::failed);
    return report({failure, testify}, now_);
  }
  if (envelope.bytes > kInlineBytes) {
    in_[at(from)].to_grant.emplace_back(number, ticket);
    return;
  }
  if (envelope.bytes > 0) std::memcpy(ticket->data.data, envelope.body, envelope.bytes);
  end(ticket, Result::finished);
}

void Messages::ring_peer(int peer) noexcept {
  segment_.control(seat_).cpu.store(current_cpu(), std::memory_order_relaxed);
  MessageLine& line = segment_.message_line(segment_.seat_of(peer));
  if (line.sleeps.load(std::memory_order_seq_cst) != 0) ring(line.bell);
}

bool Messages::announce(int peer, Outgoing& out, ChannelLines& lines) {
  if (out.waiting.empty() || out.announced - lines.receiver.taken.load(std::memory_order_seq_cst) >= kEnvelopes) {
    return false;
  }
  const TicketPtr ticket = std::move(out.waiting.front());
  out.waiting.pop_front();
  if (!out.reserved && !member_->segment->reserve_channel(seat_, segment_.seat_of(peer))) {
    end(ticket, Result::no_space);
    return true;
  }
  out.reserved = true;
  Envelope& envelope = envelope_to(peer, out.announced);
  envelope.bytes = ticket->data.size;
  envelope.count = ticket->call.count;
  envelope.tag = ticket->call.tag;
  envelope.unlisted_dtype = ticket->call.unlisted_dtype;
  envelope.dtype = static_cast<std::uint8_t>(ticket->call.dtype);
  envelope.location = id_of(ticket->location);
  envelope.flags = ticket->call.flags;
  const bool is_short = envelope.bytes <= kInlineBytes;
  if (is_short && envelope.bytes > 0) std::memcpy(envelope.body, ticket->data.data, envelope.bytes);
  if (!is_short) out.offered.emplace(out.announced, ticket);
  lines.sender.announced.store(++out.announced, std::memory_order_seq_cst);
  ring_peer(peer);
  if (is_short) {
    // The receiver need not have come.
    ticket->met = now_;
    end(ticket, Result::finished);
  }
  return true;
}

bool Messages::send_to(int peer, int most_chunks) {
  Outgoing& out = out_[at(peer)];
  ChannelLines& lines = lines_to(peer);
  bool did = false;
  while (announce(peer, out, lines)) did = true;
  for (const std::uint64_t granted = lines.receiver.granted.load(std::memory_order_seq_cst); out.grants < granted;
       ++out.grants) {
    const auto offer = out.offered.find(lines.receiver.grants[out.grants % kGrants]);
    offer->second->met = now_;
    out.streams.push_back({std::move(offer->second)});
    out.offered.erase(offer);
    did = true;
  }
  for (int chunks = 0; chunks < most_chunks && !out.streams.empty(); ++chunks) {
    if (out.staged - lines.receiver.freed.load(std::memory_order_seq_cst) >= kChunks) break;
    Stream& stream = out.streams.front();
    const Piece& data = stream.ticket->data;
    const std::uint64_t run = std::min(chunk_bytes_, data.size - stream.done);
    std::memcpy(chunk_to(peer, out.staged), data.data + stream.done, run);
    stream.done += run;
    lines.sender.staged.store(++out.staged, std::memory_order_seq_cst);
    ring_peer(peer);
    did = true;
    if (stream.done == data.size) {
      const TicketPtr ticket = std::move(stream.ticket);
      out.streams.pop_front();
      end(ticket, Result::finished);
    }
  }
  return did;
}

// Envelopes are read only for receives that wait for one: a sender that nobody listens to is held up by the ring.
bool Messages::take_envelopes(int peer, Incoming& in, ChannelLines& lines) {
  bool did = false;
  while (listens_to(peer) && in.taken != lines.sender.announced.load(std::memory_order_seq_cst)) {
    const Envelope& envelope = envelope_from(peer, in.taken);
    if (const TicketPtr ticket = find_posted(peer, envelope.tag)) {
      accept(peer, in.taken, envelope, ticket);
    } else {
      auto arrived = std::make_unique<Arrived>();
      arrived->number = in.taken;
      std::memcpy(static_cast<void*>(&arrived->envelope), &envelope,
                  offsetof(Envelope, body) + (envelope.bytes <= kInlineBytes ? envelope.bytes : 0));
      in.arrived.push_back(std::move(arrived));
    }
    lines.receiver.taken.store(++in.taken, std::memory_order_seq_cst);
    // Looked at again after the store: the sender, if it found the ring full, may sleep.
    if (lines.sender.announced.load(std::memory_order_seq_cst) - in.taken + 1 >= kEnvelopes) ring_peer(peer);
    did = true;
  }
  return did;
}

bool Messages::receive_from(int peer, int most_chunks) {
  Incoming& in = in_[at(peer)];
  ChannelLines& lines = lines_from(peer);
  bool did = take_envelopes(peer, in, lines);
  while (!in.to_grant.empty() && in.streams.size() < kGrants) {
    auto& [number, ticket] = in.to_grant.front();
    lines.receiver.grants[in.granted % kGrants] = number;
    in.streams.push_back({std::move(ticket)});
    in.to_grant.pop_front();
    lines.receiver.granted.store(++in.granted, std::memory_order_seq_cst);
    ring_peer(peer);
    did = true;
  }
  for (int chunks = 0; chunks < most_chunks && !in.streams.empty(); ++chunks) {
    if (in.freed == lines.sender.staged.load(std::memory_order_seq_cst)) break;
    Stream& stream = in.streams.front();
    const Piece& data = stream.ticket->data;
    const std::uint64_t run = std::min(chunk_bytes_, data.size - stream.done);
    std::memcpy(data.data + stream.done, chunk_from(peer, in.freed), run);
    stream.done += run;
    lines.receiver.freed.store(++in.freed, std::memory_order_seq_cst);
    if (lines.sender.staged.load(std::memory_order_seq_cst) - in.freed + 1 >= kChunks) ring_peer(peer);
    did = true;
    if (stream.done == data.size) {
      const TicketPtr ticket = std::move(stream.ticket);
      in.streams.pop_front();
      end(ticket, Result::finished);
    }
  }
  return did;
}

// Whether a receive without a message could get one from this rank. "Anybody" is anybody else.
bool Messages::listens_to(int peer) const noexcept {
  return in_[at(peer)].num_posted > 0 || (num_posted_any_ > 0 && peer != rank_);
}

bool Messages::waits_for(int peer) const noexcept {
  return listens_to(peer) || !out_[at(peer)].empty() || !in_[at(peer)].empty();
}

bool Messages::everybody_came() {
  const auto is_granted = [](const auto& channel) { return !channel.streams.empty(); };
  return std::any_of(out_.begin(), out_.end(), is_granted) || std::any_of(in_.begin(), in_.end(), is_granted);
}

// What advance() would act upon. As little as possible: while this rank spins its peer may be on the same core.
bool Messages::something_came() const noexcept {
  if (any_submitted_.load(std::memory_order_relaxed)) return true;
  const auto now = [](const std::atomic<std::uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  for (int peer = 0; peer < member_->size(); ++peer) {
    const Incoming& in = in_[at(peer)];
    if (listens_to(peer) || !in.streams.empty()) {
      const ChannelLines& lines = lines_from(peer);
      if (listens_to(peer) && now(lines.sender.announced) != in.taken) return true;
      if (!in.streams.empty() && now(lines.sender.staged) != in.freed) return true;
    }
    const Outgoing& out = out_[at(peer)];
    if (!out.empty()) {
      const ChannelLines& lines = lines_to(peer);
      if (now(lines.receiver.granted) != out.grants) return true;
      if (!out.waiting.empty() && out.announced - now(lines.receiver.taken) < kEnvelopes) return true;
      if (!out.streams.empty() && out.staged - now(lines.receiver.freed) < kChunks) return true;
    }
  }
  return false;
}

Lane::News Messages::wait_for_news(Clock::time_point until) {
  if (idle()) return News::none;
  until = std::min(until, soonest_);
  const auto shares_cpu = [&] {
    const std::uint32_t here = current_cpu();
    for (int peer = 0; peer < member_->size(); ++peer) {
      if (waits_for(peer) && segment_.control(segment_.seat_of(peer)).cpu.load(std::memory_order_relaxed) == here)
        return here != 0;
    }
    return false;
  };
  if (patience_.spin(until, shares_cpu, [&] { return something_came(); })) return News::some;
  const std::optional<Bell> bell = arm();
  bool woken = true;
  const auto now = Clock::now();
  if (bell && now < until) woken = futex_wait(*bell, std::min<std::chrono::nanoseconds>(until - now, kLongestSleep));
  disarm();
  if (!bell || advance(Clock::now())) return News::some;
  return woken ? News::none : News::interrupted;
}

std::optional<Bell> Messages::arm() {
  MessageLine& line = segment_.message_line(seat_);
  line.sleeps.store(1, std::memory_order_seq_cst);
  const Bell bell{&line.bell, line.bell.load(std::memory_order_seq_cst)};
  if (advance(Clock::now())) return std::nullopt;
  return bell;
}

void Messages::disarm() { segment_.message_line(seat_).sleeps.store(0, std::memory_order_release); }

void Messages::wake_holder() noexcept { ring(segment_.message_line(seat_).bell); }

}  // namespace phalanx
