#include "listener.hpp"

#include <algorithm>
#include <utility>

#include "futex.hpp"
#include "per_process.hpp"

namespace phalanx {

namespace {

constinit PerProcess<Listener> g_listener;

// Questions ring: this only bounds what a lost one would cost.
constexpr std::chrono::seconds kLongestNap{60};
// Bells that can be slept on at once besides the listener's own; peers in further groups are answered with a delay.
constexpr std::size_t kMostBells = 120;
constexpr std::chrono::milliseconds kBetweenLooks{250};

bool is_asked(const Answer& answer) noexcept {
  return answer.asked.load(std::memory_order_seq_cst) != answer.answered.load(std::memory_order_relaxed);
}

}  // namespace

Listener& listener() { return g_listener.get(); }

void Listener::add(std::shared_ptr<Segment> segment, Seat seat) {
  {
    const std::lock_guard lock(mutex_);
    seats_.push_back({std::move(segment), seat});
  }
  ring(bell_);
}

void Listener::remove(const Segment& segment, Seat seat) {
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(seats_, [&](const Taken& taken) { return taken.segment.get() == &segment && taken.seat == seat; });
  }
  ring(bell_);
}

void Listener::wake() noexcept {
  noted_.store(true, std::memory_order_seq_cst);
  ring(bell_);
}

void Listener::set_closed(bool closed) noexcept {
  closed_.store(closed, std::memory_order_seq_cst);
  ring(bell_);
}

std::vector<Listener::Taken> Listener::seats() {
  const std::lock_guard lock(mutex_);
  return seats_;
}

std::optional<Listener::News> Listener::next() {
  while (true) {
    std::vector<Bell> bells{{&bell_, bell_.load(std::memory_order_seq_cst)}};
    if (closed_.load(std::memory_order_seq_cst)) return std::nullopt;
    News news;
    news.noted = noted_.exchange(false, std::memory_order_seq_cst);
    const auto known = seats();
    for (const Taken& taken : known) {
      Answer& answer = taken.answer();
      const Bell bell{&answer.asked, answer.asked.load(std::memory_order_seq_cst)};
      if (is_asked(answer)) news.asked = true;
      if (bells.size() <= kMostBells) bells.push_back(bell);
    }
    if (news.asked || news.noted) return news;
    futex_wait_any(bells, known.size() > kMostBells ? std::chrono::nanoseconds(kBetweenLooks) : kLongestNap,
                   kBetweenLooks);
  }
}

void Listener::answer(const std::string& text) {
  for (const Taken& taken : seats()) {
    Answer& answer = taken.answer();
    const std::uint32_t asked = answer.asked.load(std::memory_order_seq_cst);
    if (asked == answer.answered.load(std::memory_order_relaxed)) continue;
    answer.text.write(text);
    answer.answered.store(asked, std::memory_order_seq_cst);
    futex_wake_all(answer.answered);
  }
}

void ask(const Segment& segment, Seat seat) noexcept {
  Answer& answer = segment.answer(seat);
  answer.asked.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(answer.asked);
}

std::optional<std::string> answer_of(const Segment& segment, Seat seat, std::chrono::nanoseconds patience) {
  Answer& answer = segment.answer(seat);
  const std::uint32_t number = answer.asked.load(std::memory_order_seq_cst);
  const auto until = Clock::now() + patience;
  while (true) {
    const std::uint32_t answered = answer.answered.load(std::memory_order_seq_cst);
    if (static_cast<std::int32_t>(answered - number) >= 0) return answer.text.read();
    const auto now = Clock::now();
    if (now >= until) return std::nullopt;
    futex_wait({&answer.answered, answered}, until - now);
  }
}

}  // namespace phalanx
