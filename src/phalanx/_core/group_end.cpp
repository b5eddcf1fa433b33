#include "group_end.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "exit_status.hpp"
#include "listener.hpp"
#include "peer_watch.hpp"
#include "progress.hpp"

namespace phalanx {

namespace {

constexpr std::uint64_t kKiB = 1024;

std::shared_ptr<Segment> for_moving(std::shared_ptr<Segment> segment) {
  if (segment->header().tuning.purpose != Purpose::moving) {
    throw std::invalid_argument("the segment has no room for the bytes of calls");
  }
  return segment;
}

}  // namespace

Tuning tuning_for(int ranks, int cpus) {
  const bool crowded = ranks > cpus;
  Tuning tuning{};
  tuning.slot_bytes = std::max<std::uint64_t>(256 * kKiB, smallest_slot(ranks));
  // Longer chunks where every wait costs context switches.
  tuning.chunk_bytes = crowded ? tuning.slot_bytes : 128 * kKiB;
  tuning.one_shot_bytes = ranks <= 2 ? 64 * kKiB : 32 * kKiB;
  // There is a channel for every two ranks; what is not touched costs addresses only, but of those a lot.
  tuning.message_chunk_bytes = ranks <= 32 ? 64 * kKiB : ranks <= 128 ? 16 * kKiB : 4 * kKiB;
  tuning.check = Check::on;
  tuning.crowded = crowded;
  tuning.spin_us = crowded ? 300 : 100;
  return tuning;
}

GroupEnd::GroupEnd(std::shared_ptr<Segment> segment, int rank)
    : member_(std::make_shared<Member>(for_moving(std::move(segment)), rank)),
      calls_(std::make_shared<CallQueue>(member_)),
      messages_(std::make_shared<Messages>(member_)) {
  progress().add(calls_);
  progress().add(messages_);
  listener().add(member_->segment, member_->seat());
}

GroupEnd::~GroupEnd() { leave(Leaving::closed); }

void GroupEnd::watch(const std::vector<Identity>& ranks) {
  peers_ = Peer::watch_all(ranks);
  member_->lines.watch(peers_);
}

void GroupEnd::watch_deaths(std::shared_ptr<BlackBox> box, const std::vector<int>& job_ranks,
                            const std::string& folder) {
  if (!forked() && !has_left()) peer_watch().add(member_, peers_, job_ranks, std::move(box), folder);
}

void GroupEnd::publish_location_anew(const Location* location) {
  member_->lines.publish_location(location);
  member_->location_text_in_box = member_->box && location != nullptr ? member_->box->offset_of(*location) : 0;
  member_->last_location = location;
}

void GroupEnd::keep_records(std::shared_ptr<BlackBox> box, std::uint32_t group, const std::string& path) {
  member_->keep_records(std::move(box), group, path);
}

void GroupEnd::abort(const std::string& text) { member_->abort(seq(), text); }

void GroupEnd::leave(Leaving leaving) {
  if (forked() || member_->left.exchange(true)) return;
  if (leaving == Leaving::exiting) tell_exit_status(member_->segment, member_->seat());
  member_->lines.leave(leaving);
  calls_->sweep();
  messages_->sweep();
  progress().remove(calls_);
  progress().remove(messages_);
  listener().remove(*member_->segment, member_->seat());
  peer_watch().remove(member_);
}

}  // namespace phalanx
