// One rank's side of one collective: a state machine that is advanced, never a function that blocks.
//
// A call runs through ticks (layout.hpp). In each tick a rank may
//   stage    copy what peers need from it into its slot       after its readers are done with that slot
//   combine  read its sources' slots: copy out, or reduce      after its sources have staged
//   finish   copy out what its peers have reduced              after everybody has combined
// and the stages of later ticks overlap with the combining of earlier ones. Each op fills in these three steps
// (moves.cpp, reductions.cpp); the order, the waiting and the signature check are the same for all and live in
// call.cpp.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "blocks.hpp"
#include "kernels.hpp"
#include "layout.hpp"
#include "location.hpp"
#include "reporting.hpp"

namespace phalanx {

// What the caller asks for: a call, and its memory. Blocks hold what the op reads and writes on this rank; see types.py
// for their forms.
struct Request : Description {
  // The caller waits for the call: at Check::full it ends when all ranks have made it and agree.
  bool is_waited_for = false;
  const Location* location = nullptr;
  Blocks in;
  Blocks out;
};

enum class Advance {
  finished,
  blocked,  // Call::blocked_on() says on what
  more,     // could go on at once; returned now and then so that the caller can look at signals and the clock
  failed,   // Call::finding() says how
};

class Call;

// The steps of one op. A null step means that this op has none of the kind on any rank.
struct Algorithm {
  void (*plan)(Call&);
  void (*stage)(Call&, std::uint64_t tick);
  void (*combine)(Call&, std::uint64_t tick);
  void (*finish)(Call&, std::uint64_t tick);
  // Runs once all sources have arrived and agree, where the number of ticks depends on what they bring.
  bool (*meet)(Call&);
  // A group of one rank: no ticks, no staging.
  void (*solo)(Call&);
};

const Algorithm& algorithm_of(Op op) noexcept;

// What a rank remembers from call to call. All ranks of a group go through the same values.
struct History {
  std::uint64_t seq = 0;
  std::uint64_t tick = 0;               // the next unused one
  std::uint64_t chain = 0;              // running hash of all signatures
  std::uint64_t result = 0;             // at Check::full, a hash of what the last call gave
  std::vector<std::uint64_t> verified;  // by seat: the last seq whose word was compared
};

class Call {
 public:
  Call(const Segment& segment, Lines& lines, History& history) : segment_(segment), lines_(lines), history_(history) {}

  // Takes the next seq and plans the call. `request` must outlive it.
  void start(Request& request, Clock::time_point now);
  // Goes on without ever waiting. `now` is a time just before.
  Advance advance(Clock::time_point now);
  // When the last peer came that this rank had to wait for; when it started where it had to wait for none. The epoch:
  // it waits for one that has not come.
  Clock::time_point met_at() const noexcept { return awaits_ ? Clock::time_point() : met_at_; }
  // The peer that came last, where this rank had to wait, and for one peer alone; kNoRank where it did not, or where it
  // waited for several: their order is not known.
  int last_arriver() const noexcept { return awaits_ ? kNoRank : awaited_; }
  const Condition& blocked_on() const noexcept { return blocked_on_; }
  // What this rank has found where the call has failed. Refers to this object.
  Finding finding();
  // Where peers let this rank wait: those who have come may disagree already. False: they do, and the call has failed.
  bool compare_with_those_who_came() noexcept;
  // Whether all ranks, this one included, have made the call.
  bool everybody_came() noexcept { return posted_ && lines_.reached({Counter::staged, kEverySeat, first_tick_ + 1}); }
  // From any thread.
  std::uint64_t seq() const noexcept { return seq_.load(std::memory_order_relaxed); }

  // For the steps of the ops, which speak of ranks.
  const Request& request() const noexcept { return *request_; }
  int rank() const noexcept { return lines_.rank(); }
  int size() const noexcept { return lines_.size(); }
  const Tuning& tuning() const noexcept { return segment_.header().tuning; }
  std::byte* slot(int rank, std::uint64_t tick) const noexcept {
    return segment_.slot(segment_.seat_of(rank), first_tick_ + tick);
  }
  const Descriptor& descriptor(int rank) const noexcept { return segment_.descriptor(segment_.seat_of(rank), seq_); }
  std::uint64_t* sizes(int rank) const noexcept { return segment_.sizes(segment_.seat_of(rank), seq_); }
  bool is_root() const noexcept { return request_->root == rank(); }
  // Ends the call: two ranks disagree about the sizes that they exchange, of which all know.
  void fail_by_splits(const Splits& splits) noexcept;

  // The plan, set by Algorithm::plan.
  std::uint64_t ticks = 1;
  std::uint64_t chunk = 0;          // bytes a tick moves of a block
  bool stages = false;              // this rank has something to stage
  bool finishes = false;            // the op has a third step on this rank
  bool publishes_combined = false;  // peers wait for this rank's combining
  Peers sources = Peers::none;      // whose stages this rank combines
  Peers readers = Peers::all;       // who reads this rank's slots
  ReduceFn kernel = nullptr;

 private:
  bool post();
  bool meet();
  bool check_sources() noexcept;
  // Whether all ranks have made the call and agree; true where that is not asked for.
  bool agreed();
  bool verify(Seat peer, std::uint64_t seq) noexcept;
  bool verify_history() noexcept;
  // Two ranks disagree: this one, and `peer`, about `seq`.
  struct Mismatch {
    int peer = kNoRank;
    std::uint64_t seq = 0;
    Splits splits;
  };
  void fail(const Mismatch& mismatch) noexcept;
  Seat seat() const noexcept { return lines_.seat(); }
  bool has_made(int rank, std::uint64_t seq) const noexcept;
  // Whether nobody is about to make the call of this seq.
  bool is_complete(std::uint64_t seq) const noexcept;
  void note_shapes(int peer) noexcept;
  void write_descriptor() noexcept;
  std::uint64_t result_hash() const noexcept;
  bool step();
  Advance go_on();
  // Whether the call is blocked on a peer that has not made it.
  bool awaits_peers() noexcept;
  bool reached(Peers peers, Counter counter, std::uint64_t value);
  Condition condition(Peers peers, Counter counter, std::uint64_t value) const noexcept;

  const Segment& segment_;
  Lines& lines_;
  History& history_;
  Request* request_ = nullptr;
  const Algorithm* algorithm_ = nullptr;
  std::atomic<std::uint64_t> seq_{0};  // written by the thread that makes the call, read by whoever aborts it
  std::uint64_t first_tick_ = 0;
  bool posted_ = false;
  bool met_ = false;
  bool agreed_ = false;
  bool failed_ = false;
  Mismatch mismatch_;
  bool awaits_ = false;
  bool all_came_ = false;
  int awaited_ = kNoRank;  // the peer for whom it waited last
  Clock::time_point met_at_{};
  // Ticks of this call that are behind this rank.
  std::uint64_t staged_ = 0;
  std::uint64_t combined_ = 0;
  std::uint64_t done_ = 0;
  Condition blocked_on_{Counter::done, kEverySeat, 0};
};

}  // namespace phalanx
