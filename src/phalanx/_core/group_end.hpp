// One rank's end of a group: its collectives and its messages.
//
// Thread-safe: calls may come from any thread, and so may abort() and leave().
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "call_queue.hpp"
#include "messages.hpp"

namespace phalanx {

// Chooses chunk sizes and the way of waiting for so many ranks on so many CPUs.
Tuning tuning_for(int ranks, int cpus);

class GroupEnd {
 public:
  GroupEnd(std::shared_ptr<Segment> segment, int rank);
  ~GroupEnd();
  GroupEnd(const GroupEnd&) = delete;
  GroupEnd& operator=(const GroupEnd&) = delete;

  CallQueue& calls() noexcept { return *calls_; }
  Messages& messages() noexcept { return *messages_; }
  std::shared_ptr<Lane> calls_lane() const noexcept { return calls_; }
  std::shared_ptr<Lane> messages_lane() const noexcept { return messages_; }

  // Keeps an eye on the processes of the ranks, given in rank order. A pid of 0 can't be watched.
  void watch(const std::vector<Identity>& ranks);
  // From now on calls are recorded there. To be asked before the first one.
  void keep_records(std::shared_ptr<BlackBox> box, std::uint32_t group, const std::string& path);
  // From now on the deaths of its ranks, which are these of the job, are noted there and told. See PeerWatch.
  void watch_deaths(std::shared_ptr<BlackBox> box, const std::vector<int>& job_ranks, const std::string& folder);
  // Whether anything is to be kept that explains calls.
  bool explains() const noexcept {
    return member_->box != nullptr || member_->segment->header().tuning.check != Check::off;
  }
  // True once: nobody has been refused a call here before.
  bool first_refusal() noexcept { return !has_refused_.exchange(true, std::memory_order_relaxed); }
  const Member& member() const noexcept { return *member_; }
  std::shared_ptr<const Member> shared_member() const noexcept { return member_; }
  RefusalNotes& refusals() noexcept { return member_->refusals; }
  std::optional<ShapeNote> take_note() { return member_->lines.take_note(); }
  // Lets peers know where in the program a call is made, and the black box. With the GIL held.
  void publish_location(const Location* location) {
    if (location != member_->last_location) publish_location_anew(location);
  }
  // Ends all waits of all ranks. The text goes into their errors.
  void abort(const std::string& text);
  // This rank makes no further call; peers that wait for one are told, and what is pending here ends.
  void leave(Leaving leaving);
  void say_last_words(const std::string& text) { member_->lines.say_last_words(text); }
  std::string last_words(int rank) const { return member_->lines.last_words(rank); }

  bool forked() const noexcept { return member_->segment->forked(); }
  bool broken() const noexcept { return member_->lines.failed(); }
  bool has_left() const noexcept { return member_->has_left(); }
  Failure failure() const { return member_->lines.failure(); }
  std::uint64_t seq() const noexcept { return calls_->seq(); }
  int rank() const noexcept { return member_->rank(); }
  int size() const noexcept { return member_->size(); }
  Segment& segment() noexcept { return *member_->segment; }

  // What Python knows the group by in slow calls.
  std::uint64_t token = 0;

 private:
  void publish_location_anew(const Location* location);
  const std::shared_ptr<Member> member_;
  const std::shared_ptr<CallQueue> calls_;
  const std::shared_ptr<Messages> messages_;
  std::atomic<bool> has_refused_{false};
  std::vector<std::shared_ptr<Peer>> peers_;
};

}  // namespace phalanx
