// Runs the agreement of ranks that never wait (posting.hpp, comparing.hpp, claim.hpp) through all orders of their
// steps.
//
//   interleavings all|some [fault]
//
// A world is a few ranks that make a few calls. A rank has two threads: one posts, the other tends it, which is to
// compare when something has changed, and to report. The state of a world is all that the ranks share and remember.
// From every state every step is taken that some thread could take next, and every state is visited once: so all orders
// are covered, although nobody lists them. Stores that are not sequentially consistent wait in a queue, as in the store
// buffer of a CPU, and become visible at any later time, in their order.
//
// With a fault the same search has to find what it breaks; it then prints the steps that lead there.
//
// One file, although it is long: a model is read as a whole, the state beside the steps that change it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "claim.hpp"
#include "comparing.hpp"
#include "posting.hpp"

namespace {

using namespace phalanx;

constexpr int kMostRanks = 3, kMostStores = 8;

enum class Fault {
  none,
  weak_number,       // a number is published without waiting until it is visible
  number_first,      // the number is published before the word
  no_second_look,    // a word is trusted although it may have been replaced
  one_ring,          // no words of calls that are further back than a ring is deep
  claim_by_store,    // a report is claimed by a plain store
  publish_by_store,  // a report is published by a plain store
  no_rest,           // nobody compares at rest
  one_rest,          // a rank compares at rest once, whatever comes later
  short_memory,      // a rank keeps its own words no longer than its peers can read them
  no_own_look,       // a rank trusts a word of its own although it may have been replaced
};

struct Setting {
  int ranks;
  int calls;
  int calls_of_last;        // the last rank makes fewer
  int odd_rank;             // makes another call than its peers ...
  int odd_call;             // ... with this number; 0: all agree
  bool may_die = false;     // one rank may die while it reports; where ranks compare at rest, at any time
  std::uint64_t start = 0;  // calls that were made before
  bool rests = false;       // ranks compare when something has changed
  int must_keep = 0;        // so many of its own words a rank has to keep
  Fault fault = Fault::none;
};

template <int kDepthBits, int kLevels, int kKeptBits>
class Search {
 public:
  explicit Search(const Setting& setting) : setting_(setting) {}

  // What is wrong with some order of the steps; empty: nothing, with any.
  std::string run();
  std::size_t num_states() const { return visited_.size(); }
  std::vector<std::string> path() const { return path_; }

 private:
  using Poster = Posting<kDepthBits, kLevels, kKeptBits, kMostRanks>;
  using Comparer = Comparing<kDepthBits, kLevels, kKeptBits, kMostRanks>;
  using Words = typename Poster::Words;
  using KeptWords = typename Poster::KeptWords;
  static constexpr int kDepth = static_cast<int>(Words::kDepth);
  static constexpr int kKeptDepth = static_cast<int>(KeptWords::kDepth);

  // What a store is to change once it becomes visible.
  struct Store {
    std::int8_t level;  // -1: the number
    std::int8_t slot;
    std::int8_t is_kept;  // in the rank's own memory
    std::uint64_t value;
  };

  struct Rank {
    Poster poster{0, 0};
    Comparer comparer{0, 0};
    Claim claim;
    std::uint8_t posts;  // 1: its thread has not come to its end
    enum Phase : std::uint8_t { resting, comparing, looking, claiming, reporting, ended } phase;
    std::uint8_t num_calls;  // begun
    std::uint8_t num_rests;  // comparisons at rest, of which 1 counts
    std::uint8_t is_dead;
    std::uint8_t num_stores;
    Store stores[kMostStores];
    std::uint64_t looked_at[kMostRanks];  // the numbers when it last began to compare at rest
  };

  struct State {
    std::uint64_t posted[kMostRanks];
    std::uint64_t words[kMostRanks][kLevels][kDepth];
    std::uint64_t kept[kMostRanks][kLevels][kKeptDepth];
    std::uint32_t report_state;
    std::uint32_t num_published;
    std::uint32_t times;       // how often so much time has passed that a report may be taken over
    std::uint32_t was_beyond;  // a rank was ahead of another one by more than a ring holds
    Rank ranks[kMostRanks];
  };

  // The memory as one rank sees it.
  struct View {
    State& state;
    const Setting& setting;
    int rank;

    Rank& mine() { return state.ranks[rank]; }
    std::uint64_t posted(int peer) const { return state.posted[peer]; }
    std::uint64_t posted_again(int peer) const {
      if (setting.fault == Fault::no_own_look && peer == rank) return 0;
      // Such an old number that every word counts as the right one.
      return setting.fault == Fault::no_second_look ? 0 : state.posted[peer];
    }
    std::uint64_t word(int peer, int level, std::uint64_t slot) const { return state.words[peer][level][slot]; }
    void set_word(int level, std::uint64_t slot, std::uint64_t value) {
      enqueue({static_cast<std::int8_t>(level), static_cast<std::int8_t>(slot), 0, value});
    }
    static bool agree(std::uint64_t one, std::uint64_t other) { return words_agree(one, other); }
    void keep_word(int level, std::uint64_t slot, std::uint64_t value) {
      // Where nobody reads it there are fewer states without it.
      if (setting.rests) enqueue({static_cast<std::int8_t>(level), static_cast<std::int8_t>(slot), 1, value});
    }
    std::uint64_t kept_word(int level, std::uint64_t slot) const { return state.kept[rank][level][slot]; }
    void set_posted(std::uint64_t seq) {
      if (setting.fault == Fault::weak_number) return enqueue({-1, 0, 0, seq});
      state.posted[rank] = seq;
    }
    void enqueue(Store store) { mine().stores[mine().num_stores++] = store; }

    // As a board of claims.
    ReportState report_state() const { return ReportState(state.report_state); }
    bool is_dead(int peer) const { return state.ranks[peer].is_dead != 0; }
    bool claim_report(ReportState seen, std::uint32_t number) {
      if (setting.fault != Fault::claim_by_store && state.report_state != seen.word()) return false;
      state.report_state = ReportState::claimed(number, rank).word();
      return true;
    }
  };

  // Steps are numbered: kKinds per rank.
  enum Kind { post, tend, flush, die, pass_time, kKinds };
  struct Visit {
    State state;
    int next = 0;
    int came_by = -1;
    bool goes_on = false;
  };

  bool take(State& state, int step);
  void post_of(State& state, int rank);
  void tend_of(State& state, int rank);
  bool has_changed(const State& state, int rank) const;
  bool can_compare(const State& state, int rank, int peer) const;
  std::uint64_t word_of(int rank, std::uint64_t seq) const;
  std::string wrong_with(const State& state) const;
  std::string wrong_at_the_end(const State& state) const;
  int calls_of(int rank) const { return rank == setting_.ranks - 1 ? setting_.calls_of_last : setting_.calls; }
  std::uint64_t odd_seq() const { return setting_.start + static_cast<std::uint64_t>(setting_.odd_call); }
  Clock::time_point now(const State& state) const {
    return Clock::time_point(std::chrono::hours(1) + state.times * std::chrono::milliseconds(100));
  }
  bool insert(const State& state);
  void note_distances(State& state) const;

  const Setting setting_;
  std::unordered_map<std::uint64_t, std::uint64_t> visited_;
  std::vector<std::string> path_;
};

struct Hashes {
  std::uint64_t one, other;
};

// Most of the time goes into this. Every second word goes into a chain of its own: so a CPU works on four at once.
Hashes hashes_of(const void* data, std::size_t bytes) {
  constexpr std::uint64_t kSeeds[] = {1, 77, 0x51ed, 0xbf58};
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint64_t chains[4];
  std::copy(std::begin(kSeeds), std::end(kSeeds), chains);
  const auto add = [&](int chain, std::uint64_t word) {
    chains[chain] = (chains[chain] ^ word) * 0x9e3779b97f4a7c15;
    chains[chain] ^= chains[chain] >> 29;
  };
  while (bytes > 0) {
    std::uint64_t words[2] = {};
    const std::size_t taken = std::min(bytes, sizeof(words));
    std::memcpy(words, at, taken);
    add(0, words[0]);
    add(1, words[1]);
    add(2, words[0]);
    add(3, words[1]);
    at += taken;
    bytes -= taken;
  }
  add(0, chains[1]);
  add(2, chains[3]);
  return {chains[0], chains[2]};
}

// States are told apart by a hash. A second one shows whether two states have the same.
template <int kDepthBits, int kLevels, int kKeptBits>
bool Search<kDepthBits, kLevels, kKeptBits>::insert(const State& state) {
  // Ranks that this world does not have are all zeroes.
  const Hashes hashes =
      hashes_of(&state, offsetof(State, ranks) + sizeof(Rank) * static_cast<std::size_t>(setting_.ranks));
  const auto [place, is_new] = visited_.emplace(hashes.one, hashes.other);
  if (!is_new && place->second != hashes.other) std::abort();  // two states with one hash
  return is_new;
}

// A running hash, with the two ranks' histories apart from the odd call on.
template <int kDepthBits, int kLevels, int kKeptBits>
std::uint64_t Search<kDepthBits, kLevels, kKeptBits>::word_of(int rank, std::uint64_t seq) const {
  const bool is_odd = setting_.odd_call > 0 && rank == setting_.odd_rank && seq >= odd_seq();
  return posted_word((seq * 2 + (is_odd ? 1 : 0)) << 16, 0);
}

template <int kDepthBits, int kLevels, int kKeptBits>
void Search<kDepthBits, kLevels, kKeptBits>::post_of(State& state, int rank) {
  Rank& mine = state.ranks[rank];
  View view{state, setting_, rank};
  if (!mine.poster.step(view)) return;
  if (mine.poster.difference() || mine.num_calls == calls_of(rank) || view.report_state().is_published()) {
    mine.posts = 0;
  } else {
    ++mine.num_calls;
    mine.poster.begin(word_of(rank, mine.poster.seq() + 1));
  }
}

// Whether a number has changed since the rank last began to compare at rest.
template <int kDepthBits, int kLevels, int kKeptBits>
bool Search<kDepthBits, kLevels, kKeptBits>::has_changed(const State& state, int rank) const {
  const Rank& mine = state.ranks[rank];
  if (setting_.fault == Fault::one_rest && mine.num_rests > 0) return false;
  return !std::equal(mine.looked_at, mine.looked_at + setting_.ranks, state.posted);
}

template <int kDepthBits, int kLevels, int kKeptBits>
void Search<kDepthBits, kLevels, kKeptBits>::tend_of(State& state, int rank) {
  Rank& mine = state.ranks[rank];
  View view{state, setting_, rank};
  switch (mine.phase) {
    case Rank::resting:
      if (view.report_state().is_published()) {
        mine.phase = Rank::ended;
      } else if ((mine.posts == 0 && mine.poster.difference()) || mine.comparer.difference()) {
        mine.claim.begin(view, now(state), false);
        mine.phase = Rank::looking;
      } else if (setting_.rests && setting_.fault != Fault::no_rest && has_changed(state, rank)) {
        std::copy(state.posted, state.posted + setting_.ranks, mine.looked_at);
        mine.num_rests = 1;
        mine.comparer.begin();
        mine.phase = Rank::comparing;
      }
      return;
    case Rank::comparing:
      if (mine.comparer.step(view)) mine.phase = Rank::resting;
      return;
    case Rank::looking: {
      const Claim::Next next = mine.claim.look(view, now(state));
      if (next != Claim::Next::wait) mine.phase = next == Claim::Next::claim ? Rank::claiming : Rank::ended;
      return;
    }
    case Rank::claiming:
      mine.phase = mine.claim.claim(view) ? Rank::reporting : Rank::looking;
      return;
    case Rank::reporting: {
      // As Lines::publish_report does it.
      if (state.report_state == ReportState::claimed(mine.claim.number(), rank).word() ||
          setting_.fault == Fault::publish_by_store) {
        state.report_state = ReportState::published(mine.claim.number()).word();
        ++state.num_published;
        mine.phase = Rank::ended;
      } else {
        mine.claim.begin(view, now(state), false);
        mine.phase = Rank::looking;
      }
      return;
    }
    case Rank::ended:
      return;
  }
}

// Whether words are left with which the rank can compare the call that differs, or one after it.
template <int kDepthBits, int kLevels, int kKeptBits>
bool Search<kDepthBits, kLevels, kKeptBits>::can_compare(const State& state, int rank, int peer) const {
  const std::uint64_t both = std::min(state.posted[rank], state.posted[peer]);
  for (int level = 0; level < kLevels; ++level) {
    const std::uint64_t at = both / Words::stride(level) * Words::stride(level);
    if (at < odd_seq()) return false;
    const bool keeps = KeptWords::keeps(level, at, state.posted[rank]) ||
                       state.posted[rank] + 1 < at + static_cast<std::uint64_t>(setting_.must_keep);
    if (keeps && Words::keeps(level, at, state.posted[peer])) return true;
  }
  return false;
}

template <int kDepthBits, int kLevels, int kKeptBits>
void Search<kDepthBits, kLevels, kKeptBits>::note_distances(State& state) const {
  for (int ahead = 0; ahead < setting_.ranks; ++ahead) {
    for (int behind = 0; behind < setting_.ranks; ++behind) {
      const Rank& rank = state.ranks[behind];
      // To name the first call that differs, a rank compares the call before it, too.
      const std::uint64_t before = rank.poster.seq() - 1;
      if (rank.posts != 0 && !Words::keeps(0, before, state.posted[ahead])) state.was_beyond = 1;
    }
  }
}

// False: the step is not possible here.
template <int kDepthBits, int kLevels, int kKeptBits>
bool Search<kDepthBits, kLevels, kKeptBits>::take(State& state, int step) {
  const int rank = step / kKinds;
  Rank& mine = state.ranks[rank];
  switch (static_cast<Kind>(step % kKinds)) {
    case post: {
      if (mine.is_dead != 0 || mine.posts == 0) return false;
      // A sequentially consistent store waits until those before it are visible; queues have room for a call.
      const bool must_flush =
          setting_.fault == Fault::weak_number ? mine.num_stores + 4 >= kMostStores : mine.poster.is_about_to_publish();
      if (must_flush && mine.num_stores > 0 && setting_.fault != Fault::number_first) return false;
      if (mine.num_stores + 2 > kMostStores) return false;
      post_of(state, rank);
      note_distances(state);
      return true;
    }
    case tend: {
      if (mine.is_dead != 0 || mine.phase == Rank::ended) return false;
      const State before = state;
      tend_of(state, rank);
      return std::memcmp(&before, &state, sizeof(state)) != 0;
    }
    case flush: {
      if (mine.num_stores == 0) return false;
      const Store store = mine.stores[0];
      std::copy(mine.stores + 1, mine.stores + mine.num_stores, mine.stores);
      mine.stores[--mine.num_stores] = Store{};
      if (store.level < 0) {
        state.posted[rank] = store.value;
      } else {
        (store.is_kept != 0 ? state.kept[rank][store.level][store.slot] : state.words[rank][store.level][store.slot]) =
            store.value;
      }
      return true;
    }
    case die:
      if (!setting_.may_die || mine.is_dead != 0 || mine.phase == Rank::ended) return false;
      if (!setting_.rests && mine.phase < Rank::looking) return false;
      for (int peer = 0; peer < setting_.ranks; ++peer) {
        if (state.ranks[peer].is_dead != 0) return false;
      }
      mine.is_dead = 1;
      if (setting_.rests) {
        // Nothing is left of what it knew.
        mine.posts = 0;
        mine.phase = Rank::resting;
        mine.poster = Poster(rank, setting_.ranks);
        mine.comparer = Comparer(rank, setting_.ranks);
      }
      return true;
    case pass_time:
      if (rank != 0 || state.times >= 2) return false;
      // Time matters to those who wait for a report only.
      if (!ReportState(state.report_state).is_claimed()) return false;
      ++state.times;
      return true;
    case kKinds:
      break;
  }
  return false;
}

template <int kDepthBits, int kLevels, int kKeptBits>
std::string Search<kDepthBits, kLevels, kKeptBits>::wrong_with(const State& state) const {
  if (state.num_published > 1) return "two ranks reported";
  for (int rank = 0; rank < setting_.ranks; ++rank) {
    for (const Difference& found : {state.ranks[rank].poster.difference(), state.ranks[rank].comparer.difference()}) {
      if (!found) continue;
      if (setting_.odd_call == 0) return "a difference was found where there is none";
      if (rank != setting_.odd_rank && found.peer != setting_.odd_rank) return "a rank was accused that agrees";
      if (found.agreed >= odd_seq() || found.seq < odd_seq()) return "the call that differs is not where it was found";
    }
  }
  return {};
}

template <int kDepthBits, int kLevels, int kKeptBits>
std::string Search<kDepthBits, kLevels, kKeptBits>::wrong_at_the_end(const State& state) const {
  bool found = false, all_posted = true, any_dead = false;
  for (int rank = 0; rank < setting_.ranks; ++rank) {
    const Rank& one = state.ranks[rank];
    if (one.poster.difference()) {
      found = true;
      if (state.was_beyond == 0 && !one.poster.difference().is_exact())
        return "the first call that differs was not named";
    }
    all_posted = all_posted && state.posted[rank] == setting_.start + static_cast<std::uint64_t>(calls_of(rank));
    any_dead = any_dead || one.is_dead != 0;
  }
  if (setting_.odd_call > 0 && all_posted && !found && !setting_.rests) return "nobody found the difference";
  found = found || std::any_of(state.ranks, state.ranks + setting_.ranks,
                               [](const Rank& one) { return bool(one.comparer.difference()); });
  if (found && state.num_published != 1 && !any_dead) return "the difference was not reported";
  if (setting_.rests && setting_.odd_call > 0 && state.num_published != 1) {
    for (int rank = 0; rank < setting_.ranks; ++rank) {
      for (int peer = 0; peer < setting_.ranks && state.ranks[rank].is_dead == 0; ++peer) {
        const bool differ = (rank == setting_.odd_rank) != (peer == setting_.odd_rank);
        if (differ && can_compare(state, rank, peer)) return "nobody found the difference at rest";
      }
    }
  }
  // Of two that have found it, one died: the other reports.
  int num_live_finders = 0;
  for (int rank = 0; rank < setting_.ranks; ++rank) {
    const Rank& one = state.ranks[rank];
    num_live_finders += (one.poster.difference() || one.comparer.difference()) && one.is_dead == 0 ? 1 : 0;
  }
  if (num_live_finders > 0 && state.num_published != 1) return "the difference was not reported after a death";
  return {};
}

template <int kDepthBits, int kLevels, int kKeptBits>
std::string Search<kDepthBits, kLevels, kKeptBits>::run() {
  static State first;
  std::memset(static_cast<void*>(&first), 0, sizeof(first));
  for (int rank = 0; rank < setting_.ranks; ++rank) {
    Rank& mine = first.ranks[rank];
    Poster poster(rank, setting_.ranks);
    std::memcpy(static_cast<void*>(&mine.poster), &poster, sizeof(poster));
    mine.poster.start_after(setting_.start);
    Comparer comparer(rank, setting_.ranks);
    std::memcpy(static_cast<void*>(&mine.comparer), &comparer, sizeof(comparer));
    mine.comparer.start_after(setting_.start);
    first.posted[rank] = setting_.start;
    std::fill(mine.looked_at, mine.looked_at + kMostRanks, setting_.start);
    if (calls_of(rank) == 0) {
      // It has not come.
      mine.phase = Rank::ended;
      continue;
    }
    mine.posts = 1;
    mine.num_calls = 1;
    mine.poster.begin(word_of(rank, setting_.start + 1));
  }
  std::vector<Visit> stack{{first}};
  insert(first);
  while (!stack.empty()) {
    Visit& visit = stack.back();
    const int step = visit.next++;
    std::string wrong;
    if (step < setting_.ranks * kKinds) {
      Visit after{visit.state, 0, step, false};
      if (!take(after.state, step)) continue;
      // A state is an end if nothing but a death can follow.
      visit.goes_on = visit.goes_on || step % kKinds != die;
      if (!insert(after.state)) continue;
      wrong = wrong_with(after.state);
      stack.push_back(after);
    } else {
      if (!visit.goes_on) wrong = wrong_at_the_end(visit.state);
      if (wrong.empty()) stack.pop_back();
    }
    if (wrong.empty()) continue;
    static const char* const kNames[] = {"posts", "tends", "'s store becomes visible", "dies", "waits for a while"};
    for (const Visit& one : stack) {
      if (one.came_by >= 0)
        path_.push_back("rank " + std::to_string(one.came_by / kKinds) + " " + kNames[one.came_by % kKinds]);
    }
    return wrong;
  }
  return {};
}

struct Program {
  Fault fault;
  std::size_t num_states = 0;

  template <int kDepthBits, int kLevels = 2, int kKeptBits = kDepthBits>
  bool holds(Setting setting) {
    setting.fault = fault;
    Search<kDepthBits, kLevels, kKeptBits> search(setting);
    const std::string wrong = search.run();
    num_states += search.num_states();
    if (wrong.empty()) return true;
    std::printf("%d ranks, %d calls, rank %d differs in call %d: %s, after\n", setting.ranks, setting.calls,
                setting.odd_rank, setting.odd_call, wrong.c_str());
    for (const std::string& step : search.path()) std::printf("  %s\n", step.c_str());
    return false;
  }

  // Rings of two words, which ranks leave behind easily, and of four.
  bool holds_in_both(const Setting& setting) { return holds<1>(setting) && holds<2>(setting); }

  // The last rank is behind by more than a ring holds, and comes to its end there.
  bool holds_far_behind() {
    const Setting setting{.ranks = 2, .calls = 6, .calls_of_last = 4, .odd_rank = 1, .odd_call = 3};
    return fault == Fault::one_ring ? holds<1, 1>(setting) : holds<1>(setting);
  }

  // Ranks that compare when something has changed.
  bool holds_at_rest(bool all) {
    // Words are replaced while they are read, those of the rank itself as well.
    const Setting fast{
        .ranks = 2, .calls = 3, .calls_of_last = all ? 2 : 1, .odd_rank = 1, .odd_call = 0, .rests = true};
    if (!holds<1, 1>(fast)) return false;
    // The first rank is ahead by more than a ring holds, and the last one stops at the call that differs.
    const Setting ahead{
        .ranks = 2, .calls = 3, .calls_of_last = 1, .odd_rank = 1, .odd_call = 1, .rests = true, .must_keep = 4};
    if (!(fault == Fault::short_memory ? holds<1, 1>(ahead) : holds<1, 1, 2>(ahead))) return false;
    // Further than it keeps its words, so that one of the next level must do.
    const Setting far{
        .ranks = 2, .calls = 2, .calls_of_last = 1, .odd_rank = 1, .odd_call = 1, .start = 1, .rests = true};
    if (all && !holds<1, 2>(far)) return false;
    // The third rank does not come.
    const Setting absent{.ranks = 3, .calls = 1, .calls_of_last = 0, .odd_rank = 1, .odd_call = 1, .rests = true};
    if (!holds<1, 1>(absent)) return false;
    // A rank dies, at any time.
    for (int odd_call = 0; odd_call <= 1; ++odd_call) {
      const Setting dies{.ranks = 2,
                         .calls = all ? 2 : 1,
                         .calls_of_last = 1,
                         .odd_rank = 1,
                         .odd_call = odd_call,
                         .may_die = true,
                         .rests = true};
      if (!holds<1, 1>(dies)) return false;
    }
    return true;
  }

  bool run(bool all) {
    // What these break shows at rest only.
    if (fault >= Fault::no_rest) return holds_at_rest(all);
    return holds_while_posting(all) && holds_at_rest(all);
  }

  bool holds_while_posting(bool all) {
    const auto two = [](int odd_call, std::uint64_t start) {
      return Setting{.ranks = 2,
                     .calls = 5,
                     .calls_of_last = 5,
                     .odd_rank = 1,
                     .odd_call = odd_call,
                     .may_die = true,
                     .start = start};
    };
    for (int odd_call = 0; odd_call <= 5; ++odd_call) {
      if (!holds_in_both(two(odd_call, 0))) return false;
    }
    // Numbers around 2^16 and 2^32, which are no limits here.
    for (const std::uint64_t start : {std::uint64_t{65533}, (std::uint64_t{1} << 32) - 3}) {
      if (!holds_in_both(two(0, start)) || (all && !holds_in_both(two(4, start)))) return false;
    }
    if (!holds_far_behind()) return false;
    const int calls = all ? 3 : 2;
    for (int odd_call = 0; odd_call <= calls; ++odd_call) {
      for (int odd_rank = 0; odd_rank < (odd_call == 0 ? 1 : 3); ++odd_rank) {
        const Setting three{
            .ranks = 3, .calls = calls, .calls_of_last = calls, .odd_rank = odd_rank, .odd_call = odd_call};
        if (!(all ? holds_in_both(three) : holds<2>(three))) return false;
      }
    }
    return !all ||
           holds<2>({.ranks = 3, .calls = 2, .calls_of_last = 2, .odd_rank = 2, .odd_call = 2, .may_die = true});
  }
};

const char* const kFaults[] = {"none",     "weak_number",    "number_first",     "no_second_look",
                               "one_ring", "claim_by_store", "publish_by_store", "no_rest",
                               "one_rest", "short_memory",   "no_own_look"};

}  // namespace

int main(int argc, char** argv) {
  const std::string how_many = argc > 1 ? argv[1] : "", name = argc > 2 ? argv[2] : "none";
  const auto* const found = std::find(std::begin(kFaults), std::end(kFaults), name);
  if (found == std::end(kFaults) || (how_many != "all" && how_many != "some")) {
    std::fprintf(stderr, "usage: interleavings all|some [fault]; faults:");
    for (const char* fault : kFaults) std::fprintf(stderr, " %s", fault);
    std::fprintf(stderr, "\n");
    return 2;
  }
  Program program{static_cast<Fault>(found - std::begin(kFaults))};
  if (!program.run(how_many == "all")) return 1;
  std::printf("%zu states of worlds of 2 and 3 ranks: nothing wrong\n", program.num_states);
  return 0;
}
