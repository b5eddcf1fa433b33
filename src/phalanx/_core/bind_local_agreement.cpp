// Agreements of ranks that are threads of one process, for a world that brings its own clock, deaths and order of
// steps: no thread of ours, no real time, no processes.
//
//   segment = Segment.create_private(size, tuning)  # with tuning.only_posts, and tuning.level as wanted
//
//   ranks = [LocalAgreement(segment, rank) for rank in range(size)]
//
// A rank posts its collectives with post(), which returns the number of the call and never waits. Some rank has then
// compared each call that all ranks have posted. compare_with() also compares with a rank while others are absent. Both
// keep what they find. report_now() reports it; when it does so is the world's choice, which may wait for the ranks
// that have not come. After report_now(), fail(), expire() or lose() of one rank, failure() and testimonies() say the
// same on all ranks.
//
// `now` is in seconds of any clock that never goes back. All methods are called with the GIL held, in any thread.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "agreement.hpp"
#include "bind_agreement.hpp"
#include "bind_segment.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

Clock::time_point to_time(double seconds) {
  constexpr double kLongest = 9e9;
  if (!(seconds >= 0.0 && seconds <= kLongest)) throw std::invalid_argument("expected a time of at least 0 seconds");
  return Clock::time_point(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}

class LocalAgreement {
 public:
  LocalAgreement(const MappedSegment& mapped, int rank)
      : member_(member_for_posting(mapped, rank)), agreement_(member_, [] {}, [] {}) {}

  std::uint64_t post(const Description& call, const std::string& where, std::uint64_t result) {
    if (is_message(call.op)) throw std::invalid_argument("expected a collective: the world itself matches messages");
    return agreement_.post(call, location_named(where), result);
  }
  void close_note(const Description& call) noexcept {
    if (is_message(call.op)) {
      member_->refusals.message_made(call.op == Op::send, call.peer, call.tag);
    } else {
      member_->refusals.call_made();
    }
  }
  bool compare_with(int peer) {
    check_rank(*member_, peer);
    return agreement_.compare_with(peer);
  }
  bool report_now(double now) { return agreement_.report_now(to_time(now)); }
  void fail(const Failure& failure, double now) { agreement_.fail(failure, to_time(now)); }
  void expire(const Description& call, std::uint64_t seq, const std::string& where, const std::vector<int>& missing,
              const std::vector<std::uint32_t>& other_tags, double now) {
    for (const int rank : missing) check_rank(*member_, rank);
    const std::set<std::uint32_t> tags(other_tags.begin(), other_tags.end());
    fail(member_->timeout_of({call, seq, location_named(where)}, missing, tags), now);
  }
  void lose(int peer, const Description& call, std::uint64_t seq, const std::string& where, double now) {
    check_rank(*member_, peer);
    fail(member_->end_of(peer, {call, seq, location_named(where)}), now);
  }
  std::optional<Failure> failure() const {
    if (!member_->lines.failed()) return std::nullopt;
    return member_->lines.failure();
  }
  std::vector<Testimony> testimonies() const { return member_->testimonies(); }
  std::optional<ShapeNote> take_note() { return member_->lines.take_note(); }
  void set_completed(std::uint64_t seq) noexcept { agreement_.set_completed(seq); }
  void leave(int leaving) noexcept { member_->lines.leave(static_cast<Leaving>(leaving)); }
  // As a process that is killed: it has not left, and others see its status.
  void die(int status) noexcept {
    member_->segment->last_words(member_->seat()).exit_status.store(status + 1, std::memory_order_release);
  }
  void give_up() noexcept {
    member_->lines.give_up(GaveUp::calls);
    member_->lines.give_up(GaveUp::messages);
  }
  bool has_left(int rank) const {
    check_rank(*member_, rank);
    return member_->lines.leaving(rank) != Leaving::no || member_->lines.exit_status(rank) != kUnknownStatus;
  }
  bool is_gone(int rank) const {
    return has_left(rank) ||
           member_->segment->control(member_->segment->seat_of(rank)).gave_up.load(std::memory_order_acquire) != 0;
  }
  void say_last_words(const std::string& text) noexcept { member_->lines.say_last_words(text); }
  std::string last_words(int rank) const {
    check_rank(*member_, rank);
    return member_->lines.last_words(rank);
  }
  RefusalNotes& refusals() noexcept { return member_->refusals; }
  std::vector<std::string> refusals_of(int rank) const {
    check_rank(*member_, rank);
    return member_->refusals.open_of(rank);
  }

 private:
  // A place in the program by its text. Numbered by this rank: so calls that follow each other, of which reports tell,
  // share no line of the segment, whatever else the process has run.
  const Location* location_named(const std::string& text) {
    if (text.empty()) return nullptr;
    auto& location = locations_[text];
    if (!location) {
      location = std::make_unique<const Location>(Location{static_cast<std::uint32_t>(locations_.size()), text, {}});
    }
    return location.get();
  }

  const std::shared_ptr<Member> member_;
  std::map<std::string, std::unique_ptr<const Location>> locations_;
  Agreement agreement_;
};

}  // namespace

void bind_local_agreement(nb::module_& module) {
  nb::class_<LocalAgreement>(module, "LocalAgreement",
                             "Calls that ranks post and compare which are threads of one process. The world that runs "
                             "them has the clock, and tells who is gone.")
      .def(nb::init<const MappedSegment&, int>(), "segment"_a, "rank"_a)
      .def("post", &LocalAgreement::post, "call"_a, "where"_a = "", "result"_a = 0,
           "The number of the collective among this rank's. `result` is a hash of what the call before gave, where "
           "results are compared.")
      .def("compare_with", &LocalAgreement::compare_with, "peer"_a,
           "Compares with a rank, as far as both have posted: enough if all that have posted are known to agree. "
           "Whether this rank has found a difference, now or before.")
      .def("report_now", &LocalAgreement::report_now, "now"_a,
           "Reports what this rank has found, and does not wait for ranks that have not posted the call. Whether the "
           "group has failed.")
      .def("fail", &LocalAgreement::fail, "failure"_a, "now"_a,
           "Another failure. A difference that this rank has found comes first.")
      .def("expire", &LocalAgreement::expire, "call"_a, "seq"_a, "where"_a, "missing"_a, "other_tags"_a, "now"_a,
           "The time of a call of this rank is up, for which `missing` have not come.")
      .def("lose", &LocalAgreement::lose, "peer"_a, "call"_a, "seq"_a, "where"_a, "now"_a,
           "This rank waits in a call for a peer that has left, or died.")
      .def("failure", &LocalAgreement::failure)
      .def("testimonies", &LocalAgreement::testimonies)
      .def("take_note", &LocalAgreement::take_note)
      .def("set_completed", &LocalAgreement::set_completed, "seq"_a,
           "For reports: this rank's collectives up to this one have ended well.")
      .def("leave", &LocalAgreement::leave, "leaving"_a, "This rank makes no further call.")
      .def("die", &LocalAgreement::die, "status"_a, "This rank ends as a process that is killed, with this status.")
      .def("give_up", &LocalAgreement::give_up, "This rank was told that the group has failed.")
      .def("has_left", &LocalAgreement::has_left, "rank"_a, "Whether the rank has left, or died.")
      .def("is_gone", &LocalAgreement::is_gone, "rank"_a, "Whether the rank makes no further call.")
      .def("say_last_words", &LocalAgreement::say_last_words, "text"_a, "The first words stay.")
      .def("last_words", &LocalAgreement::last_words, "rank"_a)
      .def(
          "refuse_call", [](LocalAgreement& self, const std::string& text) { self.refusals().refuse_call(text); },
          "text"_a)
      .def(
          "refuse_message",
          [](LocalAgreement& self, bool sends, int peer, std::int64_t tag, const std::string& text) {
            self.refusals().refuse_message(sends, peer, tag, text);
          },
          "sends"_a, "peer"_a, "tag"_a, "text"_a)
      .def(
          "close_note", &LocalAgreement::close_note, "call"_a,
          "Before a call is handed over, which may be long before it is posted: the rank has not refused it after all.")
      .def("refusals", &LocalAgreement::refusals_of, "rank"_a);
}

}  // namespace phalanx
