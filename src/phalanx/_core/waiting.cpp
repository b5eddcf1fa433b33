#include "waiting.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "listener.hpp"

namespace phalanx {

namespace {

#if defined(PHALANX_SEED_MISSING_RELEASE)
// A bug on purpose: tests/native/sanitize.py shows with it that the thread sanitizer would find one like it.
constexpr auto kPublishing = std::memory_order_relaxed;
#else
constexpr auto kPublishing = std::memory_order_seq_cst;
#endif

constexpr std::size_t index(Counter counter) { return static_cast<std::size_t>(counter); }

}  // namespace

Lines::Lines(const Segment& segment, int rank)
    : segment_(segment),
      header_(segment.header()),
      rank_(rank),
      seat_(segment.seat_of(rank)),
      size_(segment.size()),
      patience_(header_.tuning) {
  for (auto& seen : seen_) seen.resize(static_cast<std::size_t>(size_), 0);
}

template <class Fn>
bool Lines::all_peers(const Condition& condition, Seat waiter, Fn&& load) const noexcept {
  if (condition.seat != kEverySeat) return condition.seat == waiter || load(condition.seat) >= condition.value;
  for (const Seat peer : Seats(size_)) {
    if (peer != waiter && load(peer) < condition.value) return false;
  }
  return true;
}

bool Lines::reached(const Condition& condition) noexcept {
  auto& seen = seen_[index(condition.counter)];
  return all_peers(condition, seat_, [&](Seat peer) {
    auto& last = seen[index_of(peer)];
    if (last < condition.value) {
      last = segment_.control(peer).counters[index(condition.counter)].load(std::memory_order_acquire);
    }
    return last;
  });
}

bool Lines::reached_now(const Condition& condition) const noexcept {
  return all_peers(condition, seat_, [&](Seat peer) {
    return segment_.control(peer).counters[index(condition.counter)].load(std::memory_order_seq_cst);
  });
}

void Lines::publish(Counter counter, std::uint64_t value) noexcept {
  const std::uint64_t before = std::exchange(published_[index(counter)], value);
  Control& mine = segment_.control(seat_);
  mine.cpu.store(current_cpu(), std::memory_order_relaxed);
  mine.counters[index(counter)].store(value, kPublishing);
  if (header_.sleepers.load(std::memory_order_seq_cst) != 0) ring_if_complete(counter, before, value);
}

void Lines::ring_if_complete(Counter counter, std::uint64_t before, std::uint64_t now) noexcept {
  for (const Seat waiter : Seats(size_)) {
    if (waiter == seat_) continue;
    WaitLine& line = segment_.wait_line(waiter);
    if (line.counter.load(std::memory_order_acquire) != index(counter) + 1) continue;
    const Condition condition{counter, line.seat.load(std::memory_order_relaxed),
                              line.value.load(std::memory_order_relaxed)};
    if (condition.seat != kEverySeat && condition.seat != seat_) continue;
    // Only the step across the value can be the one that completes the condition.
    if (before >= condition.value || now < condition.value) continue;
    const bool complete = all_peers(condition, waiter, [&](Seat peer) {
      return segment_.control(peer).counters[index(counter)].load(std::memory_order_seq_cst);
    });
    if (complete) return ring(header_.bell);  // one ring wakes all; those who wait for something else go on waiting
  }
}

void Lines::ring_all() noexcept {
  ring(header_.bell);
  // Where ranks only post, none sleeps on a message. To ring for each is a system call, and every rank rings when it
  // leaves.
  if (header_.tuning.purpose == Purpose::posting) return;
  for (const Seat seat : Seats(size_)) ring(segment_.message_line(seat).bell);
}

WaitResult Lines::look(const Condition& condition) const noexcept {
  if (reached_now(condition)) return WaitResult::reached;
  if (!failed()) return first_gone(condition) != kNoRank ? WaitResult::gone : WaitResult::expired;
  if (failed_for_all() || first_gone(condition) != kNoRank) return WaitResult::failed;
  return WaitResult::expired;
}

bool Lines::shares_cpu(const Condition& condition) const noexcept {
  const std::uint32_t here = current_cpu();
  return here != 0 && !all_peers(condition, seat_, [&](Seat peer) {
           const Control& control = segment_.control(peer);
           const bool late =
               control.counters[index(condition.counter)].load(std::memory_order_relaxed) < condition.value;
           return late && control.cpu.load(std::memory_order_relaxed) == here ? 0 : condition.value;
         });
}

WaitResult Lines::wait(const Condition& condition, Clock::time_point until) noexcept {
  const bool came =
      patience_.spin(until, [&] { return shares_cpu(condition); }, [&] { return reached(condition) || failed(); });
  if (came) {
    const WaitResult result = look(condition);
    if (result != WaitResult::expired) return result;
  }
  const std::optional<Bell> bell = arm(condition);
  bool woken = true;
  const auto now = Clock::now();
  if (bell && now < until) woken = futex_wait(*bell, std::min<std::chrono::nanoseconds>(until - now, kLongestSleep));
  disarm();
  const WaitResult result = look(condition);
  return !woken && result == WaitResult::expired ? WaitResult::interrupted : result;
}

std::optional<Bell> Lines::arm(const Condition& condition) noexcept {
  WaitLine& line = segment_.wait_line(seat_);
  line.seat.store(condition.seat, std::memory_order_relaxed);
  line.value.store(condition.value, std::memory_order_relaxed);
  line.counter.store(static_cast<std::uint32_t>(index(condition.counter)) + 1, std::memory_order_seq_cst);
  if (!std::exchange(armed_, true)) header_.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const Bell bell{&header_.bell, header_.bell.load(std::memory_order_seq_cst)};
  if (look(condition) == WaitResult::expired) return bell;
  return std::nullopt;
}

void Lines::disarm() noexcept {
  if (!std::exchange(armed_, false)) return;
  header_.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  segment_.wait_line(seat_).counter.store(0, std::memory_order_release);
}

std::vector<int> Lines::missing(const Condition& condition) const {
  std::vector<int> peers;
  for (int peer = 0; peer < size_; ++peer) {
    const Seat seat = segment_.seat_of(peer);
    if (seat == seat_ || (condition.seat != kEverySeat && condition.seat != seat)) continue;
    if (segment_.control(seat).counters[index(condition.counter)].load(std::memory_order_acquire) < condition.value) {
      peers.push_back(peer);
    }
  }
  return peers;
}

bool Lines::gone(int rank, GaveUp kind, bool ask) const noexcept {
  const std::uint32_t gave_up = segment_.control(segment_.seat_of(rank)).gave_up.load(std::memory_order_seq_cst);
  if ((gave_up & static_cast<std::uint32_t>(kind)) != 0) return true;
  Peer* process = process_of(rank);
  const Leaving left = leaving(rank);
  // For the sake of its exit code, where nothing else tells why it ends.
  if (left == Leaving::exiting && process != nullptr && last_words(rank).empty()) {
    return exit_status(rank) != kUnknownStatus || process->ended_or_late();
  }
  if (left != Leaving::no) return true;
  return process != nullptr && (process->known_dead() || (ask && process->dead()));
}

int Lines::first_gone(const Condition& condition) const noexcept {
  const bool ask = !peers_.empty() && deaths_.due();
  for (int peer = 0; peer < size_; ++peer) {
    const Seat seat = segment_.seat_of(peer);
    if (seat == seat_ || (condition.seat != kEverySeat && condition.seat != seat)) continue;
    const auto is_late = [&] {
      return segment_.control(seat).counters[index(condition.counter)].load(std::memory_order_seq_cst) <
             condition.value;
    };
    // The second look comes after the peer is known to be gone: it may have taken its last step just before.
    if (is_late() && gone(peer, GaveUp::calls, ask) && is_late()) return peer;
  }
  return kNoRank;
}

Failure Lines::describe_gone(int rank) const {
  Failure failure;
  failure.rank = rank_;
  failure.peer = rank;
  failure.leaving = leaving(rank);
  failure.kind = failure.leaving == Leaving::no ? FailureKind::lost : FailureKind::left;
  Peer* process = process_of(rank);
  if (process != nullptr && failure.leaving != Leaving::closed && process->dead()) failure.status = process->status();
  if (failure.leaving == Leaving::no && process != nullptr && process->replaced()) {
    failure.leaving = Leaving::replaced;
    copy_text(failure.command_line, process->command_line());
  }
  if (failure.status == kUnknownStatus) failure.status = exit_status(rank);
  return failure;
}

// What a process that is going down has told of its end.
std::int32_t Lines::exit_status(int rank) const noexcept {
  const std::int32_t told = segment_.last_words(segment_.seat_of(rank)).exit_status.load(std::memory_order_acquire);
  return told != 0 ? told - 1 : kUnknownStatus;
}

bool Lines::claim_report(ReportState state, std::uint32_t number) noexcept {
  std::uint32_t seen = state.word();
  return header_.report_state.compare_exchange_strong(seen, ReportState::claimed(number, rank_).word(),
                                                      std::memory_order_acq_rel);
}

bool Lines::publish_report(std::uint32_t number, const Failure& failure) noexcept {
  header_.failures[number] = failure;
  std::uint32_t mine = ReportState::claimed(number, rank_).word();
  return header_.report_state.compare_exchange_strong(mine, ReportState::published(number).word(), kPublishing);
}

bool Lines::nap(Clock::time_point until) const noexcept {
  const Bell before = bell();
  const auto now = Clock::now();
  return failed() || now >= until || futex_wait(before, std::min<std::chrono::nanoseconds>(until - now, kLongestSleep));
}

Failure Lines::failure() const {
  const ReportState state = report_state();
  if (state.is_published()) return header_.failures[state.report()];
  Failure lost;
  lost.kind = FailureKind::aborted;
  copy_text(lost.reason, "several ranks died or were held up while they reported a failure");
  return lost;
}

bool Lines::failed_for_all() const {
  if (header_.aborted.load(std::memory_order_seq_cst) != 0) return true;
  const FailureKind kind = failure().kind;
  return kind != FailureKind::left && kind != FailureKind::lost;
}

void Lines::give_up(GaveUp kind) noexcept {
  segment_.control(seat_).gave_up.fetch_or(static_cast<std::uint32_t>(kind), std::memory_order_seq_cst);
}

void Lines::leave(Leaving leaving) noexcept {
  segment_.control(seat_).left.store(static_cast<std::uint32_t>(leaving), std::memory_order_seq_cst);
  ring_all();
}

void Lines::publish_location(const Location* location) noexcept {
  if (location == nullptr) return;
  LocationLine& line = segment_.location_line(seat_, location->id);
  if (line.id.load(std::memory_order_relaxed) != location->id) {
    line.id.store(0, std::memory_order_relaxed);
    line.text.write(location->text);
    line.id.store(location->id, std::memory_order_release);
  }
}

std::string Lines::location_text(int rank, std::uint32_t id) const {
  if (id == 0) return {};
  const LocationLine& line = segment_.location_line(segment_.seat_of(rank), id);
  if (line.id.load(std::memory_order_acquire) != id) return {};
  std::string text = line.text.read();
  std::atomic_thread_fence(std::memory_order_acquire);
  return line.id.load(std::memory_order_relaxed) == id ? text : std::string();
}

void Lines::testify(std::uint32_t report, int rank, LaneKind kind, std::uint64_t called,
                    std::uint64_t latest) noexcept {
  const Seat seat = segment_.seat_of(rank);
  Testimony& testimony = segment_.testimony(report, seat);
  const auto made = [&](std::uint64_t seq) -> MadeCall {
    if (seq == 0) return {};
    const Descriptor found = segment_.descriptor(seat, seq);
    // Gone by now, where the rank is far ahead.
    if (found.seq != seq) return {};
    MadeCall call{seq, found.result, found.call, {}};
    copy_text(call.where, location_text(rank, found.location));
    return call;
  };
  testimony.call = made(called);
  // Ranks that do not wait may have got further: what matters is what came before.
  const std::uint64_t completed = segment_.answer(seat).completed.load(std::memory_order_acquire);
  testimony.completed = made(std::min(completed, latest));
  copy_text(testimony.refused, segment_.refusal(seat, kind).text.read());
}

void Lines::note(ShapeNote note) {
  note_ = std::move(note);
  noted_.store(true, std::memory_order_release);
  listener().wake();
}

std::optional<ShapeNote> Lines::take_note() {
  if (!noted_.exchange(false, std::memory_order_acq_rel)) return std::nullopt;
  return note_;
}

void Lines::say_last_words(const std::string& text) noexcept {
  LastWords& words = segment_.last_words(seat_);
  if (words.said.load(std::memory_order_relaxed) != 0) return;
  copy_text(words.text, text);
  words.said.store(1, std::memory_order_release);
}

std::string Lines::last_words(int rank) const {
  const LastWords& words = segment_.last_words(segment_.seat_of(rank));
  return words.said.load(std::memory_order_acquire) != 0 ? words.text : "";
}

}  // namespace phalanx
