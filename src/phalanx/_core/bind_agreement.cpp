#include "bind_agreement.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "agreement.hpp"
#include "bind_box.hpp"
#include "bind_origin.hpp"
#include "completions.hpp"
#include "exit_status.hpp"
#include "gil.hpp"
#include "listener.hpp"
#include "splits.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

// The records of posted calls that have not ended. Who carries the calls out tells when they have.
class PostRecords {
 public:
  PostRecords(Member& member, Engine engine) noexcept : member_(member), engine_(engine) {}

  // Before the call is posted: the record stays if the process dies there.
  BoxEntry begin(const Description& call, const Location* location) {
    if (!member_.box || member_.box->forked()) return {};
    if (member_.last_location != location) {
      member_.last_location = location;
      member_.location_text_in_box = location != nullptr ? member_.box->offset_of(*location) : 0;
    }
    BoxCall record;
    record.group = member_.box_group;
    record.call = call;
    record.call.engine = engine_;
    record.location = member_.location_text_in_box;
    record.created = Clock::now();
    return member_.box->begin(record);
  }
  void number(const BoxEntry& entry, const Description& call, std::uint64_t seq) {
    if (entry.id() == 0) return;
    entry.number(seq);
    if (is_message(call.op)) {
      const Message message{call.peer, call.op == Op::send, seq};
      messages_[message] = entry;
      oldest_.push_back(message);
      if (oldest_.size() > kMost) {
        messages_.erase(oldest_.front());
        oldest_.pop_front();
      }
    } else {
      calls_[seq % kMost] = {seq, entry};
    }
  }
  void end(const Description& call, std::uint64_t seq, bool well) {
    if (!is_message(call.op)) {
      auto& [known, entry] = calls_[seq % kMost];
      if (known == seq) std::exchange(entry, BoxEntry()).end(well);
      return;
    }
    const auto found = messages_.find({call.peer, call.op == Op::send, seq});
    if (found == messages_.end()) return;
    found->second.end(well);
    messages_.erase(found);
  }

 private:
  static constexpr std::size_t kMost = 1024;
  using Message = std::tuple<int, bool, std::uint64_t>;  // its peer, whether this rank sends, and its number

  Member& member_;
  const Engine engine_;
  std::vector<std::pair<std::uint64_t, BoxEntry>> calls_ = std::vector<std::pair<std::uint64_t, BoxEntry>>(kMost);
  std::map<Message, BoxEntry> messages_;
  std::deque<Message> oldest_;  // the last messages that were posted, ended or not, oldest first
};

// One rank's end of a group that only posts, from the time when all ranks have the segment until the rank leaves.
class JoinedAgreement {
 public:
  // `token` goes to the completions when the group has a failure.
  JoinedAgreement(const MappedSegment& mapped, int rank, const std::vector<Pid>& processes, std::uint64_t token,
                  int engine, bool matches_tags)
      : member_(make_member(mapped, rank, processes)),
        agreement_(std::make_shared<Agreement>(
            member_, [token] { completions().push(token); }, [] { progress().wake(true); },
            matches_tags ? Matching::by_tag : Matching::by_order)),
        records_(*member_, static_cast<Engine>(engine)),
        level_(static_cast<int>(member_->segment->header().tuning.check)),
        identity_(member_->identity()) {
    progress().add(agreement_);
    progress().wake(false);
    listener().add(member_->segment, member_->seat());
  }
  ~JoinedAgreement() { leave(false); }
  JoinedAgreement(const JoinedAgreement&) = delete;
  JoinedAgreement& operator=(const JoinedAgreement&) = delete;

  std::uint64_t post(Description call, std::uint64_t result, std::uint64_t balance = 0) {
    if (forked()) throw std::runtime_error("this process was forked from the one that is in the group");
    if (member_->has_left()) throw std::runtime_error("this rank has left the group");
    // A receive from anybody is posted when its sender is known.
    if (is_message(call.op)) check_rank(*member_, call.peer);
    const auto [location, flags] = origin_of_call();
    call.flags |= flags;
    const BoxEntry entry = records_.begin(call, location);
    const std::uint64_t seq = is_message(call.op) ? agreement_->post_message(call, location)
                                                  : agreement_->post(call, location, result, balance);
    records_.number(entry, call, seq);
    return seq;
  }
  // Whether the ranks are known to disagree, or the group has failed otherwise.
  bool is_broken() const noexcept { return !forked() && (agreement_->has_found() || member_->lines.failed()); }
  // Once it is broken: waits until the failure is known. False: it takes longer than this.
  bool wait_for_failure(double seconds) {
    const WithoutGil without;
    const auto until = Clock::now() + std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
    while (!forked() && !member_->lines.failed() && Clock::now() < until) {
      agreement_->advance(Clock::now());
      member_->lines.nap(std::min(until, Clock::now() + Reporting::kBetweenLooks));
    }
    return !forked() && member_->lines.failed();
  }
  // The number of the last collective that a rank has posted.
  std::uint64_t posted(int rank) const {
    check_rank(*member_, rank);
    return forked() ? 0 : agreement_->posted(rank);
  }
  void expect_any_sender() {
    if (!forked()) agreement_->expect_any_sender();
  }
  std::uint64_t messages_posted(int peer, bool sends) const {
    check_rank(*member_, peer);
    return forked() ? 0 : agreement_->messages_posted(peer, sends);
  }
  std::string place_of(const Description& call, std::uint64_t seq) const {
    return forked() ? std::string() : agreement_->place_of(call, seq);
  }
  // A rank that posts no further call: it has left, or its process is gone.
  bool is_gone(int rank) const {
    check_rank(*member_, rank);
    return !forked() && member_->lines.gone(rank, GaveUp::calls, true);
  }
  // A rank that has left in order.
  bool has_left_well(int rank) const {
    check_rank(*member_, rank);
    return !forked() && member_->lines.leaving(rank) != Leaving::no;
  }
  // This rank waits in a call for a rank that is gone.
  void fail_by_end(int peer, const Description& call, std::uint64_t seq) {
    check_rank(*member_, peer);
    if (forked()) return;
    const WithoutGil without;
    // What it had posted may say why: an engine may end a process where the ranks disagree.
    if (!agreement_->compare()) {
      Failure failure = member_->end_of(peer, {call, seq, nullptr});
      copy_text(failure.where, agreement_->place_of(call, seq));
      agreement_->fail(failure, Clock::now());
    }
    progress().wake(true);
  }
  // This rank gives up waiting in a call for these ranks.
  void fail_by_timeout(const std::vector<int>& missing, const Description& call, std::uint64_t seq) {
    for (const int rank : missing) check_rank(*member_, rank);
    if (forked()) return;
    const WithoutGil without;
    Failure failure = member_->timeout_of({call, seq, nullptr}, missing);
    copy_text(failure.where, agreement_->place_of(call, seq));
    agreement_->fail(failure, Clock::now());
    progress().wake(true);
  }
  void abort(const std::string& reason) {
    if (forked() || member_->has_left()) return;
    const WithoutGil without;
    member_->abort(agreement_->seq(), reason);
    progress().wake(true);
  }
  // Asks a rank where it is.
  void ask_rank(int rank) {
    check_rank(*member_, rank);
    if (!forked()) ask(*member_->segment, member_->segment->seat_of(rank));
  }
  std::optional<std::string> answer_of_rank(int rank, double seconds) {
    check_rank(*member_, rank);
    if (forked()) return std::nullopt;
    const WithoutGil without;
    return answer_of(*member_->segment, member_->segment->seat_of(rank),
                     std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9)));
  }
  // The same, for a call that is about to be made. 0: the group is broken, known by now or before, or this rank is in
  // it no more, and the call must not be made.
  std::int64_t begin(const Description& call, std::uint64_t balance = 0) {
    if (forked() || member_->has_left() || is_broken()) return 0;
    const std::uint64_t seq = post(call, 0, balance);
    if (!agreement_->has_found()) return static_cast<std::int64_t>(seq);
    records_.end(call, seq, false);
    return -static_cast<std::int64_t>(seq);
  }
  // The engine has ended the call well. Returns whether the group is broken.
  bool finish(const Description& call, std::uint64_t seq) {
    end(call, seq, true);
    return is_broken();
  }
  void end(const Description& call, std::uint64_t seq, bool well) {
    if (forked()) return;
    records_.end(call, seq, well);
    if (well && !is_message(call.op)) agreement_->set_completed(seq);
  }
  std::optional<Failure> failure() const {
    if (forked() || !(member_->lines.failed() || agreement_->was_told())) return std::nullopt;
    return member_->lines.failure();
  }
  std::vector<Testimony> testimonies() const { return forked() ? std::vector<Testimony>() : member_->testimonies(); }
  std::optional<ShapeNote> take_note() { return forked() ? std::nullopt : member_->lines.take_note(); }
  std::uint64_t seq() const noexcept { return agreement_->seq(); }
  int level() const noexcept { return level_; }
  bool is_forked() const noexcept { return forked(); }
  bool has_left() const noexcept { return member_->has_left(); }
  std::string identity() const { return identity_; }
  void keep_records(const HeldBox& held, std::uint32_t group, const std::string& path) {
    if (!forked()) member_->keep_records(held.box, group, path);
  }
  std::string box_of(int rank) const {
    check_rank(*member_, rank);
    return forked() ? std::string() : member_->segment->answer(member_->segment->seat_of(rank)).box.read();
  }
  void say_last_words(const std::string& text) {
    if (!forked()) member_->lines.say_last_words(text);
  }
  std::string last_words(int rank) const {
    check_rank(*member_, rank);
    return forked() ? std::string() : member_->lines.last_words(rank);
  }
  void leave(bool exiting) {
    if (forked() || member_->left.exchange(true)) return;
    const WithoutGil without;
    listener().remove(*member_->segment, member_->seat());
    progress().remove(agreement_);
    agreement_->compare();
    agreement_->report_until(Clock::now() + kWaitForReport);
    if (exiting) tell_exit_status(member_->segment, member_->seat());
    member_->lines.leave(exiting ? Leaving::exiting : Leaving::closed);
  }

 private:
  static std::shared_ptr<Member> make_member(const MappedSegment& mapped, int rank, const std::vector<Pid>& processes) {
    auto member = member_for_posting(mapped, rank);
    if (processes.size() != static_cast<std::size_t>(member->size()))
      throw std::invalid_argument("expected one process per rank");
    member->lines.watch(Peer::watch_all(to_identities(processes)));
    return member;
  }
  // How long a rank that leaves waits for another rank that reports.
  static constexpr std::chrono::milliseconds kWaitForReport{200};

  // A forked child does not have the memory.
  bool forked() const noexcept { return member_->segment->forked(); }

  const std::shared_ptr<Member> member_;
  const std::shared_ptr<Agreement> agreement_;
  PostRecords records_;
  // A forked child does not have the memory that they come from.
  const int level_;
  const std::string identity_;
};

}  // namespace

std::shared_ptr<Member> member_for_posting(const MappedSegment& mapped, int rank) {
  if (mapped.segment->header().tuning.purpose != Purpose::posting) {
    throw std::invalid_argument("the segment is for calls whose bytes are moved");
  }
  return std::make_shared<Member>(mapped.segment, rank);
}

void check_rank(const Member& member, int rank) {
  if (rank < 0 || rank >= member.size()) {
    throw std::invalid_argument("expected a rank of the group, got " + std::to_string(rank));
  }
}

void bind_agreement(nb::module_& module) {
  nb::class_<JoinedAgreement>(module, "Agreement", "Calls that ranks post and compare, without ever waiting.")
      .def(nb::init<const MappedSegment&, int, const std::vector<Pid>&, std::uint64_t, int, bool>(), "segment"_a,
           "rank"_a, "processes"_a, "token"_a, "engine"_a = static_cast<int>(Engine::other), "matches_tags"_a = false)
      .def(
          "post",
          [](JoinedAgreement& self, const DividedCall& call, std::uint64_t result) {
            return self.post(call, result, call.balance);
          },
          "call"_a, "result"_a = 0)
      .def(
          "post",
          [](JoinedAgreement& self, const Description& call, std::uint64_t result) { return self.post(call, result); },
          "call"_a, "result"_a = 0, "The number of the call among this rank's.")
      .def(
          "begin", [](JoinedAgreement& self, const DividedCall& call) { return self.begin(call, call.balance); },
          "call"_a)
      .def(
          "begin", [](JoinedAgreement& self, const Description& call) { return self.begin(call); }, "call"_a,
          "Posts a call that is about to be made. 0: the group was broken or left before, and nothing is posted. Below "
          "0: "
          "minus its number, and the ranks differ. In both cases the call must not be made.")
      .def("finish", &JoinedAgreement::finish, "call"_a, "seq"_a,
           "The engine has ended the call well. Returns whether the group is broken.")
      .def("end", &JoinedAgreement::end, "call"_a, "seq"_a, "well"_a, "For reports and records: the call has ended.")
      .def_prop_ro("is_broken", &JoinedAgreement::is_broken,
                   "Whether ranks are known to disagree, or the group has failed otherwise.")
      .def("wait_for_failure", &JoinedAgreement::wait_for_failure, "seconds"_a,
           "Of a broken group: waits until the failure is known. Returns whether it is.")
      .def("posted", &JoinedAgreement::posted, "rank"_a, "The number of the last collective that a rank has posted.")
      .def("expect_any_sender", &JoinedAgreement::expect_any_sender,
           "This rank receives from anybody: from now on its receives are not compared.")
      .def("messages_posted", &JoinedAgreement::messages_posted, "peer"_a, "sends"_a,
           "How many messages a peer has posted to this rank (it is the sender), or from it.")
      .def("place_of", &JoinedAgreement::place_of, "call"_a, "seq"_a, "Where this rank has made a call.")
      .def("is_gone", &JoinedAgreement::is_gone, "rank"_a, "Whether a rank has left, or its process is gone.")
      .def("has_left_well", &JoinedAgreement::has_left_well, "rank"_a, "Whether a rank has left in order.")
      .def("fail_by_end", &JoinedAgreement::fail_by_end, "peer"_a, "call"_a, "seq"_a,
           "This rank waits in a call for a rank that is gone.")
      .def("fail_by_timeout", &JoinedAgreement::fail_by_timeout, "missing"_a, "call"_a, "seq"_a,
           "This rank gives up waiting in a call for these ranks.")
      .def("abort", &JoinedAgreement::abort, "reason"_a)
      .def("ask", &JoinedAgreement::ask_rank, "rank"_a)
      .def("answer_of", &JoinedAgreement::answer_of_rank, "rank"_a, "seconds"_a)
      .def("failure", &JoinedAgreement::failure)
      .def("testimonies", &JoinedAgreement::testimonies)
      .def("take_note", &JoinedAgreement::take_note)
      .def_prop_ro("seq", &JoinedAgreement::seq)
      .def_prop_ro("level", &JoinedAgreement::level)
      .def_prop_ro("forked", &JoinedAgreement::is_forked)
      .def_prop_ro("has_left", &JoinedAgreement::has_left)
      .def_prop_ro("identity", &JoinedAgreement::identity)
      .def("keep_records", &JoinedAgreement::keep_records, "box"_a, "group"_a, "path"_a)
      .def("box_of", &JoinedAgreement::box_of, "rank"_a)
      .def("say_last_words", &JoinedAgreement::say_last_words, "text"_a)
      .def("last_words", &JoinedAgreement::last_words, "rank"_a)
      .def("leave", &JoinedAgreement::leave, "exiting"_a = false);
}

}  // namespace phalanx
