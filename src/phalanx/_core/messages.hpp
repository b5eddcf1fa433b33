// Point to point: the messages of one rank in one group.
//
// From each rank to each other leads a channel. The sender announces a message by an envelope; a short one travels in
// it and the send is done. A long one waits until the receiver, which knows which receive it belongs to, grants it;
// then it is streamed through the channel's chunks, one granted message after another. So messages are matched by tag
// in whatever order receives are made, none waits behind one that nobody wants yet, and nothing is ever kept twice but
// short messages whose receive has not been made. Order is kept by (sender, tag), since envelopes are read in order. A
// rank's messages to itself take the same way.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "lane.hpp"
#include "member.hpp"

namespace phalanx {

class Messages : public Lane {
 public:
  explicit Messages(std::shared_ptr<Member> member);

  // The ticket's memory must stay until it has ended.
  void submit(std::shared_ptr<MessageTicket> ticket);
  // This rank has been told that the group is broken.
  void give_up_if_idle() noexcept;

 protected:
  bool advance(Clock::time_point now) override { return go_on(now, kChunksAtOnce); }
  // Moves no chunks of long messages.
  bool advance_briefly(Clock::time_point now) override { return go_on(now, 0); }
  void fail_stuck_calls() override;
  void end_reported() override;
  std::vector<int> missing(const Ticket& ticket) const override {
    return peers_of(static_cast<const MessageTicket&>(ticket));
  }
  // A message that was granted: its receive has been made, too.
  bool everybody_came() override;
  std::vector<PendingCall> list_pending() const override;
  News wait_for_news(Clock::time_point until) override;
  bool linger() override { return false; }
  std::optional<Bell> arm() override;
  void disarm() override;
  // Whatever came since arm() has rung the bell.
  bool arm_again() override { return !reporting_.is_under_way() && !something_came(); }
  void wake_holder() noexcept override;

 private:
  using TicketPtr = std::shared_ptr<MessageTicket>;
  // A message under way through the chunks of a channel.
  struct Stream {
    TicketPtr ticket;
    std::uint64_t done = 0;
  };
  // One that nobody has asked for yet.
  struct Arrived {
    std::uint64_t number;
    Envelope envelope;
  };
  struct Outgoing {
    bool reserved = false;
    bool given_up = false;                       // the peer is gone, in both directions
    std::deque<TicketPtr> waiting;               // not announced yet
    std::map<std::uint64_t, TicketPtr> offered;  // announced, not granted yet, by number
    std::deque<Stream> streams;                  // granted
    std::uint64_t announced = 0;
    std::uint64_t grants = 0;
    std::uint64_t staged = 0;
    bool empty() const noexcept { return waiting.empty() && offered.empty() && streams.empty(); }
  };
  struct Incoming {
    std::deque<std::unique_ptr<Arrived>> arrived;
    std::deque<std::pair<std::uint64_t, TicketPtr>> to_grant;  // matched, but too many are granted
    std::deque<Stream> streams;                                // granted
    std::uint64_t num_posted = 0;                              // receives from this very peer without a message
    std::uint64_t taken = 0;
    std::uint64_t granted = 0;
    std::uint64_t freed = 0;
    bool empty() const noexcept { return to_grant.empty() && streams.empty() && num_posted == 0; }
  };

  // Tickets and lists speak of ranks, the segment of seats: this is the border.
  ChannelLines& lines_to(int peer) const noexcept { return segment_.channel_lines(seat_, segment_.seat_of(peer)); }
  ChannelLines& lines_from(int peer) const noexcept { return segment_.channel_lines(segment_.seat_of(peer), seat_); }
  Envelope& envelope_to(int peer, std::uint64_t number) const noexcept {
    return segment_.envelope(seat_, segment_.seat_of(peer), number);
  }
  const Envelope& envelope_from(int peer, std::uint64_t number) const noexcept {
    return segment_.envelope(segment_.seat_of(peer), seat_, number);
  }
  std::byte* chunk_to(int peer, std::uint64_t number) const noexcept {
    return segment_.message_chunk(seat_, segment_.seat_of(peer), number);
  }
  const std::byte* chunk_from(int peer, std::uint64_t number) const noexcept {
    return segment_.message_chunk(segment_.seat_of(peer), seat_, number);
  }

  // Chunks that a channel moves before others get their turn.
  static constexpr int kChunksAtOnce = 8;
  bool go_on(Clock::time_point now, int most_chunks);
  void take_submitted();
  bool find_arrived(const TicketPtr& ticket);
  TicketPtr find_posted(int from, std::uint32_t tag);
  void accept(int from, std::uint64_t number, const Envelope& envelope, const TicketPtr& ticket);
  bool send_to(int peer, int most_chunks);
  bool announce(int peer, Outgoing& out, ChannelLines& lines);
  bool receive_from(int peer, int most_chunks);
  bool take_envelopes(int peer, Incoming& in, ChannelLines& lines);
  void ring_peer(int peer) noexcept;
  bool listens_to(int peer) const noexcept;
  bool waits_for(int peer) const noexcept;
  bool something_came() const noexcept;

  void end(const TicketPtr& ticket, Result result);
  void end_all(Result result);
  // What is under way to and from the peer; a receive from anybody once it has a message.
  std::vector<TicketPtr> tickets_of(int peer) const;
  // The same, out of all lists.
  std::vector<TicketPtr> take_tickets_of(int peer);
  // All that are under way, out of all lists.
  std::vector<TicketPtr> take_all();
  // Ends the messages to and from the peer, who will not take part in them any more.
  void fail_with(int peer, Clock::time_point now);
  static Member::Doing doing(const MessageTicket& ticket) noexcept;
  std::vector<int> peers_of(const MessageTicket& ticket) const;
  std::set<std::uint32_t> tags_from(const std::vector<int>& peers) const;

  const std::shared_ptr<Member> member_;
  const Segment& segment_;
  const int rank_;
  const Seat seat_;
  const std::uint64_t chunk_bytes_;
  Patience patience_;
  DeathWatch deaths_;
  std::vector<std::pair<TicketPtr, Result>> ending_;  // those that end with what is reported
  std::vector<Outgoing> out_;
  std::vector<Incoming> in_;
  std::list<TicketPtr> posted_;  // receives without a message, in the order in which they were made
  std::uint64_t num_posted_any_ = 0;
  Clock::time_point now_{};                               // just before what is done now
  int first_source_ = 0;                                  // where the search for a message from anybody begins
  Clock::time_point soonest_ = Clock::time_point::max();  // no deadline comes before

  std::mutex mutex_;  // of what follows
  std::vector<TicketPtr> submitted_;
  std::vector<std::uint64_t> num_sent_, num_received_;  // by peer; receives from anybody count in the last
  std::atomic<bool> any_submitted_{false};
  std::atomic<bool> gave_up_{false};
};

}  // namespace phalanx
