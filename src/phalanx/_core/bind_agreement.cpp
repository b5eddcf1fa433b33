#include "bind_agreement.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "agreement.hpp"
#include "bind_origin.hpp"
#include "bind_segment.hpp"
#include "completions.hpp"
#include "gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

// One rank's end of a group that only posts, from the time when all ranks have the segment until the rank leaves.
class JoinedAgreement {
 public:
  // `token` goes to the completions when the group has a failure.
  JoinedAgreement(const MappedSegment& mapped, int rank, const std::vector<Pid>& processes, std::uint64_t token)
      : member_(make_member(mapped, rank, processes)),
        agreement_(std::make_shared<Agreement>(
            member_, [token] { completions().push(token); }, [] { progress().wake(true); })) {
    progress().add(agreement_);
    progress().wake(false);
  }
  ~JoinedAgreement() { leave(); }
  JoinedAgreement(const JoinedAgreement&) = delete;
  JoinedAgreement& operator=(const JoinedAgreement&) = delete;

  std::uint64_t post(const Description& call) {
    if (forked()) throw std::runtime_error("this process was forked from the one that is in the group");
    if (member_->has_left()) throw std::runtime_error("this rank has left the group");
    // A receive from anybody is posted when its sender is known.
    if (is_message(call.op) && (call.peer < 0 || call.peer >= member_->size())) {
      throw std::invalid_argument("expected a rank of the group as the peer of a message");
    }
    const Location* const location = origin_of_call().location;
    return is_message(call.op) ? agreement_->post_message(call, location) : agreement_->post(call, location);
  }
  std::optional<Failure> failure() const {
    if (forked() || !(member_->lines.failed() || agreement_->was_told())) return std::nullopt;
    return member_->lines.failure();
  }
  std::vector<Testimony> testimonies() const { return forked() ? std::vector<Testimony>() : member_->testimonies(); }
  std::uint64_t seq() const noexcept { return agreement_->seq(); }
  void leave() {
    if (forked() || member_->left.exchange(true)) return;
    const WithoutGil without;
    progress().remove(agreement_);
    agreement_->compare();
    agreement_->report_until(Clock::now() + kLongestReport);
    member_->lines.leave(Leaving::closed);
  }

 private:
  static std::shared_ptr<Member> make_member(const MappedSegment& mapped, int rank, const std::vector<Pid>& processes) {
    auto member = member_for_posting(mapped, rank);
    if (processes.size() != static_cast<std::size_t>(member->size()))
      throw std::invalid_argument("expected one process per rank");
    member->lines.watch(Peer::watch_all(to_identities(processes)));
    return member;
  }
  // A rank that leaves gives so much time to another one that reports.
  static constexpr std::chrono::milliseconds kLongestReport{200};

  // A forked child does not have the memory.
  bool forked() const noexcept { return member_->segment->forked(); }

  const std::shared_ptr<Member> member_;
  const std::shared_ptr<Agreement> agreement_;
};

}  // namespace

std::shared_ptr<Member> member_for_posting(const MappedSegment& mapped, int rank) {
  if (mapped.segment->header().tuning.purpose != Purpose::posting) {
    throw std::invalid_argument("the segment is for calls whose bytes are moved");
  }
  return std::make_shared<Member>(mapped.segment, rank);
}

void bind_agreement(nb::module_& module) {
  nb::class_<JoinedAgreement>(module, "Agreement", "Calls that ranks post and compare, without ever waiting.")
      .def(nb::init<const MappedSegment&, int, const std::vector<Pid>&, std::uint64_t>(), "segment"_a, "rank"_a,
           "processes"_a, "token"_a)
      .def("post", &JoinedAgreement::post, "call"_a, "The number of the call among this rank's.")
      .def("failure", &JoinedAgreement::failure)
      .def("testimonies", &JoinedAgreement::testimonies)
      .def_prop_ro("seq", &JoinedAgreement::seq)
      .def("leave", &JoinedAgreement::leave);
}

}  // namespace phalanx
