// A thread that learns of a peer's death at once, whatever the program does meanwhile.
//
// Threads that wait for a peer notice its death themselves, and raise an error in their own time. But a launcher ends
// the survivors as soon as it sees a rank die: by then the death must be in their black boxes, and on the terminal.
// The thread sleeps in poll() on the pidfds of all peers and runs no Python code. One per process, while there are
// peers to watch.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "black_box.hpp"
#include "member.hpp"
#include "peers.hpp"
#include "wake_pipe.hpp"

namespace phalanx {

class PeerWatch {
 public:
  // Watches the processes of a group's ranks, which are `job_ranks` of the job, from now until remove(). Deaths go to
  // the box; the first one that is a crash is told on stderr, by one process of those that share the job's folder.
  void add(const std::shared_ptr<Member>& member, const std::vector<std::shared_ptr<Peer>>& peers,
           const std::vector<int>& job_ranks, std::shared_ptr<BlackBox> box, const std::string& folder);
  void remove(const std::shared_ptr<Member>& member);
  // Watches a process that is to be a rank of a group which is being made, until as many makings have ended as begun.
  void begin_making();
  void add_to_making(const std::shared_ptr<Peer>& peer, int job_rank, std::shared_ptr<BlackBox> box,
                     const std::string& folder);
  void end_making();
  // Looks without waiting: who is dead by now is noted before this returns.
  void look();

 private:
  using PeerPtr = std::shared_ptr<Peer>;
  using Membership = std::pair<std::shared_ptr<Member>, int>;
  // A peer, and its places in the groups that this process shares with it; no member: in one that is being made.
  struct Watched {
    int job_rank = 0;
    std::vector<Membership> memberships;
    int false_alarms = 0;
    bool done = false;  // its death is known, or it can't be watched any more
  };
  struct Death {
    int job_rank;
    Identity identity;
    std::int32_t status;
    bool replaced;  // it called exec
    bool in_order;  // it had left its groups, and speaks for itself
  };

  static bool has_left(const Membership& membership, std::int32_t status) noexcept;

  void forget(const std::shared_ptr<Member>& member);
  void stop_if_idle();
  // Starts the thread, or has it look whom to watch.
  void start();
  void run();
  std::vector<PeerPtr> to_watch();
  std::vector<Death> look_at(const std::vector<PeerPtr>& peers);
  void tell(const std::vector<Death>& deaths);

  std::mutex thread_mutex_;  // of starting and stopping
  std::thread thread_;
  std::atomic<bool> stop_{false};
  WakePipe pipe_;
  std::mutex mutex_;  // of what follows
  std::map<PeerPtr, Watched> watched_;
  std::shared_ptr<BlackBox> box_;
  std::string folder_;
  int num_makings_ = 0;
  bool failure_known_ = false;  // some rank has failed before, and speaks for itself
};

// That of this process.
PeerWatch& peer_watch();

}  // namespace phalanx
