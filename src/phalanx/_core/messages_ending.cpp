// Messages that can't be carried out: who is gone, whose time is up, and what ends by it. messages.cpp carries out the
// others.
#include <algorithm>
#include <set>
#include <utility>

#include "messages.hpp"

namespace phalanx {

std::vector<PendingCall> Messages::list_pending() const {
  std::vector<PendingCall> pending;
  const auto add = [&](const TicketPtr& ticket, bool is_matched) {
    pending.push_back({.op = ticket->call.op,
                       .seq = ticket->seq.load(std::memory_order_relaxed),
                       .peer = ticket->call.peer,
                       .tag = ticket->call.tag,
                       .is_matched = is_matched,
                       .missing = peers_of(*ticket),
                       .where = text_of(ticket->location)});
  };
  for (const Outgoing& out : out_) {
    for (const TicketPtr& ticket : out.waiting) add(ticket, false);
    for (const auto& [number, ticket] : out.offered) add(ticket, false);
    for (const Stream& stream : out.streams) add(stream.ticket, true);
  }
  for (const Incoming& in : in_) {
    for (const auto& [number, ticket] : in.to_grant) add(ticket, true);
    for (const Stream& stream : in.streams) add(stream.ticket, true);
  }
  for (const TicketPtr& ticket : posted_) add(ticket, false);
  return pending;
}

namespace {

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

}  // namespace

std::vector<Messages::TicketPtr> Messages::tickets_of(int peer) const {
  const Outgoing& out = out_[at(peer)];
  const Incoming& in = in_[at(peer)];
  std::vector<TicketPtr> tickets(out.waiting.begin(), out.waiting.end());
  for (const auto& [number, ticket] : out.offered) tickets.push_back(ticket);
  for (const Stream& stream : out.streams) tickets.push_back(stream.ticket);
  for (const auto& [number, ticket] : in.to_grant) tickets.push_back(ticket);
  for (const Stream& stream : in.streams) tickets.push_back(stream.ticket);
  for (const TicketPtr& ticket : posted_) {
    if (ticket->call.peer == peer) tickets.push_back(ticket);
  }
  return tickets;
}

std::vector<Messages::TicketPtr> Messages::take_tickets_of(int peer) {
  std::vector<TicketPtr> tickets = tickets_of(peer);
  Outgoing& out = out_[at(peer)];
  Incoming& in = in_[at(peer)];
  out.waiting.clear();
  out.offered.clear();
  out.streams.clear();
  in.to_grant.clear();
  in.streams.clear();
  in.num_posted = 0;
  posted_.remove_if([&](const TicketPtr& ticket) { return ticket->call.peer == peer; });
  return tickets;
}

std::vector<Messages::TicketPtr> Messages::take_all() {
  if (any_submitted_.load(std::memory_order_acquire)) take_submitted();
  std::vector<TicketPtr> all;
  for (int peer = 0; peer < member_->size(); ++peer) {
    const std::vector<TicketPtr> tickets = take_tickets_of(peer);
    all.insert(all.end(), tickets.begin(), tickets.end());
  }
  // What is left are receives from anybody.
  num_posted_any_ = 0;
  all.insert(all.end(), posted_.begin(), posted_.end());
  posted_.clear();
  return all;
}

void Messages::end_all(Result result) {
  for (const TicketPtr& ticket : take_all()) end(ticket, result);
}

void Messages::fail_with(int peer, Clock::time_point now) {
  out_[at(peer)].given_up = true;
  Finding finding{member_->end_of(peer, doing(*tickets_of(peer).front()))};
  for (const TicketPtr& ticket : take_tickets_of(peer)) ending_.emplace_back(ticket, Result::failed);
  report(std::move(finding), now);
}

void Messages::end_reported() {
  for (const auto& [ticket, result] : std::exchange(ending_, {})) end(ticket, result);
}

Member::Doing Messages::doing(const MessageTicket& ticket) noexcept {
  return {ticket.call, ticket.seq.load(std::memory_order_relaxed), ticket.location, ticket.asked};
}

std::vector<int> Messages::peers_of(const MessageTicket& ticket) const {
  if (ticket.call.peer != kAnySource) return {ticket.call.peer};
  std::vector<int> peers;
  for (int peer = 0; peer < member_->size(); ++peer) {
    if (peer != rank_) peers.push_back(peer);
  }
  return peers;
}

// The tags of messages that came and that nobody receives: the likely cause where another one is missing.
std::set<std::uint32_t> Messages::tags_from(const std::vector<int>& peers) const {
  std::set<std::uint32_t> tags;
  for (const int peer : peers) {
    for (const auto& message : in_[at(peer)].arrived) tags.insert(message->envelope.tag);
  }
  return tags;
}

void Messages::fail_stuck_calls() {
  if (member_->has_left()) {
    reporting_.end_now(Clock::now());
    for (const auto& [ticket, result] : std::exchange(ending_, {})) end(ticket, Result::left);
    return end_all(Result::left);
  }
  if (reporting_.is_under_way()) return;
  if (member_->lines.failed() && member_->lines.failed_for_all()) return end_all(Result::failed);
  const auto now = Clock::now();
  std::vector<int> gone;
  const bool ask = deaths_.due();
  for (int peer = 0; peer < member_->size(); ++peer) {
    if (waits_for(peer) && member_->lines.gone(peer, GaveUp::messages, ask)) gone.push_back(peer);
  }
  if (!gone.empty()) {
    // Now that it is known that they do no more: what they did before may be enough.
    if (advance(now)) return;
    for (const int peer : gone) {
      if (!out_[at(peer)].empty() || !in_[at(peer)].empty()) fail_with(peer, now);
    }
    if (num_posted_any_ > 0 && gone.size() + 1 == at(member_->size())) {
      // Of several the one that has an exception to tell.
      const auto told =
          std::find_if(gone.begin(), gone.end(), [&](int peer) { return !member_->lines.last_words(peer).empty(); });
      Finding finding{member_->end_of(told != gone.end() ? *told : gone.front(), doing(*posted_.front()))};
      for (const TicketPtr& ticket : take_all()) ending_.emplace_back(ticket, Result::failed);
      return report(std::move(finding), now);
    }
  }
  if (now < soonest_ - Member::kAskBefore) return;
  soonest_ = Clock::time_point::max();
  TicketPtr late;
  const auto look_at = [&](const TicketPtr& ticket) {
    if (!ticket->asked && ticket->deadline - Member::kAskBefore <= now) {
      member_->ask_missing(*ticket, peers_of(*ticket));
    }
    if (ticket->deadline <= now) {
      late = ticket;
    } else {
      soonest_ = std::min(soonest_, ticket->deadline);
    }
  };
  for (int peer = 0; peer < member_->size(); ++peer) {
    for (const TicketPtr& ticket : tickets_of(peer)) look_at(ticket);
  }
  for (const TicketPtr& ticket : posted_) look_at(ticket);
  if (!late) return;
  const auto other_tags = late->sends() ? std::set<std::uint32_t>() : tags_from(peers_of(*late));
  Finding finding{member_->timeout_of(doing(*late), peers_of(*late), other_tags)};
  for (const TicketPtr& ticket : take_all()) {
    ending_.emplace_back(ticket, ticket == late ? Result::failed : Result::was_broken);
  }
  report(std::move(finding), now);
}

}  // namespace phalanx
