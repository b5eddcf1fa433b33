// Random messages between all ranks, hundreds in flight: of sizes around every limit, by tags in another order than
// they were sent, from a named rank or from anybody, in both directions at once, alone or among collectives.
//
// Every rank makes its sends and receives in an order of its own. What the k-th message from one rank to another with a
// tag holds, and its size, comes of those numbers; so whoever receives it can tell that it is the right one.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "plans.hpp"

namespace stress {

namespace {

constexpr std::uint64_t kMessagesAWorld = 300;  // sends, of all ranks
constexpr std::uint32_t kTags = 4;
// Receives of these tags name no source.
constexpr std::uint32_t kTagsOfAnybody = 2;
constexpr std::uint64_t kCallsAmong = 24;

// What all ranks agree on.
struct Traffic {
  std::uint64_t seed;
  int size;
  std::uint64_t chunk_bytes;
  std::uint64_t num_each;  // messages of every tag from each rank to each other
  std::uint32_t first_tag;

  static bool of_anybody(std::uint32_t tag) { return tag % kTags < kTagsOfAnybody; }

  std::uint64_t key(int from, int to, std::uint32_t tag, std::uint64_t number) const {
    const std::uint64_t ranks = static_cast<std::uint64_t>(from) << 32 | static_cast<std::uint64_t>(to);
    return mix(mix(seed, ranks), static_cast<std::uint64_t>(tag) << 32 | number);
  }
  // A receive from anybody must know the size before the sender.
  std::uint64_t bytes(int from, int to, std::uint32_t tag, std::uint64_t number) const {
    Random random(of_anybody(tag) ? key(-1, to, tag, 0) : key(from, to, tag, number));
    switch (random.below(6)) {
      case 0:
        return random.below(3);
      case 1:
        return random.below(kInlineBytes);
      case 2:
        return kInlineBytes - 1 + random.below(3);
      case 3:
        return kInlineBytes + random.below(2 * kInlineBytes);
      case 4:
        return kInlineBytes + (1 + random.below(3 * kChunks)) * chunk_bytes - kInlineBytes % chunk_bytes +
               random.below(3) - 1;
      default:
        return random.below(20'000);
    }
  }
  Bytes contents(int from, int to, std::uint32_t tag, std::uint64_t number) const {
    Bytes bytes_of(bytes(from, to, tag, number));
    std::uint64_t hash = key(from, to, tag, number);
    for (std::byte& byte : bytes_of) byte = static_cast<std::byte>((hash = hash * 0xd1342543de82ef95 + 1) >> 56);
    return bytes_of;
  }
};

// One side of a message under way, in memory of its exact size so that the address sanitizer sees one byte too many.
struct Parcel {
  bool sends;
  int peer;  // as asked for
  std::uint32_t tag;
  std::uint64_t number = 0;  // among those to or from this peer with this tag
  Bytes expected;            // empty where it is not known before the source is
  std::uint64_t size = 0;
  std::unique_ptr<std::byte[]> memory;
  std::shared_ptr<MessageTicket> ticket;
};

// All sends and receives of one rank; those with the same peer and tag get their numbers as they are made.
class Correspondence {
 public:
  Correspondence(GroupEnd& group, const Traffic& traffic, Random random)
      : group_(group), traffic_(traffic), random_(random) {
    for (int peer = 0; peer < traffic.size; ++peer) {
      if (peer == group.rank()) continue;
      for (std::uint32_t i = 0; i < kTags; ++i) {
        const std::uint32_t tag = traffic.first_tag + i;
        for (std::uint64_t k = 0; k < traffic.num_each; ++k) {
          to_make_.push_back({true, peer, tag, 0, {}, 0, nullptr, nullptr});
          to_make_.push_back({false, Traffic::of_anybody(tag) ? kAnySource : peer, tag, 0, {}, 0, nullptr, nullptr});
        }
      }
    }
    for (std::size_t i = to_make_.size(); i > 1; --i) std::swap(to_make_[i - 1], to_make_[random_.below(i)]);
  }

  bool has_more() const { return made_ < to_make_.size(); }
  std::size_t num() const { return to_make_.size(); }

  void make_next() {
    Parcel& parcel = to_make_[made_++];
    parcel.number = numbers_[{parcel.sends, parcel.peer, parcel.tag}]++;
    const int me = group_.rank();
    if (parcel.sends) {
      parcel.expected = traffic_.contents(me, parcel.peer, parcel.tag, parcel.number);
    } else if (parcel.peer != kAnySource) {
      parcel.expected = traffic_.contents(parcel.peer, me, parcel.tag, parcel.number);
    }
    parcel.size = parcel.peer == kAnySource ? traffic_.bytes(-1, me, parcel.tag, 0) : parcel.expected.size();
    parcel.memory = std::make_unique<std::byte[]>(parcel.size);
    if (parcel.sends) std::copy(parcel.expected.begin(), parcel.expected.end(), parcel.memory.get());
    parcel.ticket = start_message(group_, kPatience,
                                  {parcel.sends,
                                   parcel.peer,
                                   parcel.tag,
                                   DType::uint8,
                                   static_cast<std::int64_t>(parcel.size),
                                   {parcel.memory.get(), parcel.size}});
    // A look at any of those under way, which must not wait long: a peer may have to be given its part first.
    if (random_.one_in(8)) {
      const Parcel& other = to_make_[random_.below(made_)];
      group_.messages().wait(*other.ticket, Clock::now() + std::chrono::microseconds(random_.pick({0, 20, 200})));
    }
  }

  // Waits for all in any order, in any way. Parcel i has notice `first_notice` + i.
  void finish(Notices& notices, std::size_t first_notice, Complaints& complaints) {
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < made_; ++i) order.push_back(i);
    for (std::size_t i = made_; i > 1; --i) std::swap(order[i - 1], order[random_.below(i)]);
    for (const std::size_t i : order) {
      Ticket& ticket = *to_make_[i].ticket;
      const std::uint64_t way = random_.below(12);
      if (way == 0) {
        if (poll(ticket) == Result::pending) complaints.push_back("nobody carried out a message that was polled");
      } else if (way < 4 && notices.expect(ticket, first_notice + i)) {
        notices.wait(first_notice + i);
      }
      wait_for(group_.messages(), ticket, std::chrono::microseconds(random_.pick({0, 20, 50'000})));
    }
    std::map<std::pair<int, std::uint32_t>, std::uint64_t> from_anybody;
    for (std::size_t i = 0; i < made_; ++i) check(to_make_[i], from_anybody, complaints);
  }

 private:
  void check(Parcel& parcel, std::map<std::pair<int, std::uint32_t>, std::uint64_t>& from_anybody,
             Complaints& complaints) {
    const std::string what =
        text("%s %d, tag %u, number %llu, %llu bytes", parcel.sends ? "send to" : "receive from", parcel.peer,
             parcel.tag, static_cast<unsigned long long>(parcel.number), static_cast<unsigned long long>(parcel.size));
    if (parcel.ticket->result() != Result::finished) {
      const Failure failure = group_.failure();
      return complaints.push_back(text("%s: %s (failure %u by rank %d)", what.c_str(), name_of(parcel.ticket->result()),
                                       static_cast<unsigned>(failure.kind), failure.rank));
    }
    const int source = parcel.ticket->source.load();
    if (parcel.peer == kAnySource) {
      if (source < 0 || source >= traffic_.size || source == group_.rank()) {
        return complaints.push_back(text("%s: came from %d", what.c_str(), source));
      }
      // Those from one source came in the order in which they were sent, and so were the receives that took them.
      const std::uint64_t number = from_anybody[{source, parcel.tag}]++;
      parcel.expected = traffic_.contents(source, group_.rank(), parcel.tag, number);
    } else if (!parcel.sends && source != parcel.peer) {
      complaints.push_back(text("%s: came from %d", what.c_str(), source));
    }
    const std::byte* memory = parcel.memory.get();
    if (!std::equal(memory, memory + parcel.size, parcel.expected.begin(), parcel.expected.end())) {
      complaints.push_back(what + ": the contents are wrong");
    }
  }

  GroupEnd& group_;
  const Traffic& traffic_;
  Random random_;
  std::vector<Parcel> to_make_;
  std::size_t made_ = 0;
  std::map<std::tuple<bool, int, std::uint32_t>, std::uint64_t> numbers_;
};

// Collectives that are made among the messages and left to whoever carries them out.
class Among {
 public:
  Among(GroupEnd& group, std::uint64_t seed, const Tuning& tuning) : group_(group), seed_(seed), tuning_(tuning) {}

  void make_next() {
    if (calls_.size() == kCallsAmong) return;
    auto call = std::make_unique<Made>();
    call->plan = random_plan(seed_, calls_.size(), group_.size(), tuning_, Mixture::all_ops);
    Random random(mix(mix(seed_, calls_.size()), static_cast<std::uint64_t>(group_.rank()) + 1));
    call->side = std::make_unique<Side>(call->plan, group_.rank(), random);
    call->ticket = start_call(group_, kPatience, random.pick({Handing::at_once, Handing::later}),
                              [&](Request& request) { call->side->fill(request); });
    calls_.push_back(std::move(call));
  }
  void finish(Complaints& complaints) {
    while (calls_.size() < kCallsAmong) make_next();
    for (const auto& call : calls_) {
      if (wait_for(group_.calls(), *call->ticket) != Result::finished) {
        return complaints.push_back(text("%s: %s", call->plan.describe().c_str(), name_of(call->ticket->result())));
      }
      call->side->check(complaints);
    }
  }

 private:
  struct Made {
    Plan plan;
    std::unique_ptr<Side> side;
    std::shared_ptr<CallTicket> ticket;
  };
  GroupEnd& group_;
  const std::uint64_t seed_;
  const Tuning& tuning_;
  std::vector<std::unique_ptr<Made>> calls_;
};

// `threads` threads of every rank, each with tags of its own, share its lane.
Complaints messages(int size, Random& random, int threads, bool among_calls) {
  const Tuning tuning = random_tuning(random);
  const std::uint64_t seed = random.next();
  const auto channels = static_cast<std::uint64_t>(size * (size - 1));
  const std::uint64_t num_each =
      std::max<std::uint64_t>(1, kMessagesAWorld / channels / kTags / static_cast<std::uint64_t>(threads));
  const std::size_t parcels_a_thread = 2 * static_cast<std::size_t>(size - 1) * kTags * num_each;
  World world(size, tuning);
  Notices notices(parcels_a_thread * static_cast<std::size_t>(size * threads));
  Complaints complaints = on_ranks(all_ranks(size * threads), [&](int thread, Complaints& mine) {
    GroupEnd& group = world[thread % size];
    const auto number = static_cast<std::uint64_t>(thread);
    Random own(mix(seed, ~number));
    std::optional<Looker> looker;
    if (own.one_in(8)) looker.emplace(group);
    const Traffic traffic{seed, size, tuning.message_chunk_bytes, num_each,
                          kTags * static_cast<std::uint32_t>(thread / size)};
    Correspondence correspondence(group, traffic, Random(own.next()));
    Among among(group, seed, tuning);
    while (correspondence.has_more()) {
      correspondence.make_next();
      if (among_calls && own.one_in(8)) among.make_next();
      if (own.one_in(32)) yield_times(own.below(200));
    }
    const bool calls_first = own.one_in(2);
    if (among_calls && calls_first) among.finish(mine);
    correspondence.finish(notices, number * parcels_a_thread, mine);
    if (among_calls && !calls_first) among.finish(mine);
  });
  for (int rank = 0; rank < size; ++rank) {
    expect(complaints, world[rank].messages().idle(), "no message to be left over");
  }
  expect(complaints, notices.in_order(), "one notice for each message that asked for it");
  return complaints;
}

}  // namespace

void run_message_cases(Tally& tally, int size, std::uint64_t seed) {
  if (size == 1) return;
  std::uint64_t number = 200;
  const auto run = [&](const char* name, const std::function<Complaints(Random&)>& body) {
    tally.run_seeded(name, size, seed, ++number, body);
  };
  run("messages", [&](Random& random) { return messages(size, random, 1, false); });
  run("messages among calls", [&](Random& random) { return messages(size, random, 1, true); });
  run("messages of three threads", [&](Random& random) { return messages(size, random, 3, false); });
}

}  // namespace stress
