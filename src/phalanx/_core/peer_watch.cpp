#include "peer_watch.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "last_look.hpp"
#include "per_process.hpp"
#include "without_signals.hpp"

namespace phalanx {

namespace {

constinit PerProcess<PeerWatch> g_peer_watch;

// Whoever makes this file in the job's folder is the one that speaks. debug/folders.py removes it with the folder.
constexpr char kClaim[] = "crash";

// A process whose descriptor fires although it lives wakes the watcher no more than so often.
constexpr int kMostFalseAlarms = 1000;
constexpr std::chrono::milliseconds kAfterFalseAlarm{1};

// How long the watcher sleeps at most, in milliseconds: without end but for programs that close descriptors which they
// did not open. Then nobody may be able to wake it, and it looks more often.
constexpr int kLongestNap = 1000;
constexpr int kNapWithoutPipe = 50;

bool is_failure(std::int32_t status) noexcept { return status == kUnknownStatus || status != 0; }

bool is_terminated(std::int32_t status) noexcept {
  return status != kUnknownStatus && WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM;
}

std::string signal_name(int number) {
#if defined(__GLIBC__) && defined(__GLIBC_PREREQ)
#if __GLIBC_PREREQ(2, 32)
  const char* name = ::sigabbrev_np(number);
  if (name != nullptr) return std::string("SIG") + name;
#endif
#endif
  return "signal " + std::to_string(number);
}

std::string describe(std::int32_t status) {
  if (status == kUnknownStatus) return "died; its exit status is not visible to this process";
  if (WIFSIGNALED(status)) return "was killed by " + signal_name(WTERMSIG(status));
  return "left early with exit code " + std::to_string(WEXITSTATUS(status));
}

// Folders may have any name: a terminal gets printable characters only.
std::string printable(std::string text) {
  unsigned char before = 0;
  for (char& letter : text) {
    const auto byte = static_cast<unsigned char>(letter);
    // The second byte of U+0080 to U+009F, which terminals obey, too.
    const bool is_late_control = before == 0xc2 && byte < 0xa0;
    if (byte < 0x20 || byte == 0x7f || is_late_control) letter = '?';
    before = byte;
  }
  return text;
}

// A terminal or pipe that takes no more must not hold this thread up.
bool can_write_stderr() noexcept {
  pollfd out{STDERR_FILENO, POLLOUT, 0};
  return ::poll(&out, 1, 0) == 1 && (out.revents & POLLOUT) != 0;
}

// True for one process of those that share the folder.
bool claim(const std::string& folder, const std::string& text) noexcept {
  const int handle = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (handle < 0) return false;
  struct stat status{};
  // As debug/job_folder.py has it: only a folder of this user's own, to which nobody else can write.
  const bool is_own =
      ::fstat(handle, &status) == 0 && status.st_uid == ::geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
  const int fd = is_own ? ::openat(handle, kClaim, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600) : -1;
  ::close(handle);
  if (fd < 0) return false;
  [[maybe_unused]] const auto written = ::write(fd, text.data(), text.size());
  ::close(fd);
  return true;
}

}  // namespace

PeerWatch& peer_watch() { return g_peer_watch.get(); }

void PeerWatch::add(const std::shared_ptr<Member>& member, const std::vector<PeerPtr>& peers,
                    const std::vector<int>& job_ranks, std::shared_ptr<BlackBox> box, const std::string& folder) {
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t rank = 0; rank < peers.size() && rank < job_ranks.size(); ++rank) {
      if (!peers[rank]) continue;
      Watched& watched = watched_[peers[rank]];
      watched.job_rank = job_ranks[rank];
      watched.memberships.emplace_back(member, static_cast<int>(rank));
    }
    box_ = std::move(box);
    folder_ = folder;
  }
  start();
}

void PeerWatch::remove(const std::shared_ptr<Member>& member) {
  const std::lock_guard lock(thread_mutex_);
  {
    const std::lock_guard watched_lock(mutex_);
    forget(member);
  }
  stop_if_idle();
}

// With the lock of what is watched.
void PeerWatch::forget(const std::shared_ptr<Member>& member) {
  for (auto& [peer, watched] : watched_) {
    std::erase_if(watched.memberships, [&](const auto& membership) { return membership.first == member; });
  }
  std::erase_if(watched_, [](const auto& entry) { return entry.second.memberships.empty(); });
}

// With the lock of starting and stopping.
void PeerWatch::stop_if_idle() {
  {
    const std::lock_guard lock(mutex_);
    if (!watched_.empty() || !thread_.joinable()) return;
    stop_.store(true, std::memory_order_seq_cst);
  }
  pipe_.ring();
  thread_.join();
  withdraw_last_look();
  stop_.store(false, std::memory_order_seq_cst);
  pipe_.close();
}

void PeerWatch::begin_making() {
  const std::lock_guard lock(mutex_);
  ++num_makings_;
}

void PeerWatch::add_to_making(const PeerPtr& peer, int job_rank, std::shared_ptr<BlackBox> box,
                              const std::string& folder) {
  bool is_new = false;
  {
    const std::lock_guard lock(mutex_);
    const auto [place, added] = watched_.try_emplace(peer);
    is_new = added;
    Watched& watched = place->second;
    watched.job_rank = job_rank;
    const auto is_there = [](const Membership& membership) { return membership.first == nullptr; };
    if (std::none_of(watched.memberships.begin(), watched.memberships.end(), is_there))
      watched.memberships.emplace_back(nullptr, 0);
    box_ = std::move(box);
    folder_ = folder;
  }
  // The thread watches the others already.
  if (is_new) start();
}

void PeerWatch::end_making() {
  const std::lock_guard lock(thread_mutex_);
  {
    const std::lock_guard watched_lock(mutex_);
    if (num_makings_ == 0 || --num_makings_ > 0) return;
    forget(nullptr);
  }
  stop_if_idle();
}

// A process that is in no group has nothing to say to peers. One that ends by itself has written down why.
bool PeerWatch::has_left(const Membership& membership, std::int32_t status) noexcept {
  if (membership.first == nullptr) return status != kUnknownStatus && WIFEXITED(status);
  return membership.first->lines.leaving(membership.second) != Leaving::no;
}

void PeerWatch::start() {
  const std::lock_guard lock(thread_mutex_);
  if (thread_.joinable()) {
    pipe_.ring();
    return;
  }
  if (!pipe_.open()) return;  // no more files to be had: whoever waits notices deaths itself
  const WithoutSignals without;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {
    pipe_.close();
    return;
  }
  ::pthread_setname_np(thread_.native_handle(), "phalanx-deaths");
  offer_last_look(pipe_);
}

std::vector<PeerWatch::PeerPtr> PeerWatch::to_watch() {
  const std::lock_guard lock(mutex_);
  std::vector<PeerPtr> peers;
  for (const auto& [peer, watched] : watched_) {
    if (!watched.done) peers.push_back(peer);
  }
  return peers;
}

void PeerWatch::run() {
  std::uint32_t answered = num_last_looks();
  while (true) {
    std::vector<pollfd> fds{{pipe_.fd(), POLLIN, 0}};
    const std::vector<PeerPtr> peers = to_watch();
    // poll() leaves out a negative descriptor, which a peer has that was dead before it could be watched.
    bool is_late = false;
    for (const PeerPtr& peer : peers) {
      is_late |= peer->known_dead();
      fds.push_back({peer->pidfd(), POLLIN, 0});
    }
    if (stop_.load(std::memory_order_seq_cst)) return;
    // Whoever asked before this gets an answer from a look that begins now.
    const std::uint32_t asked = num_last_looks();
    const int longest = fds[0].fd < 0 ? kNapWithoutPipe : kLongestNap;
    const int found = ::poll(fds.data(), fds.size(), is_late || asked != answered ? 0 : longest);
    // The system is short of memory, or of descriptors since a limit was lowered.
    if (found < 0 && errno != EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(kNapWithoutPipe));
    if (found > 0 && fds[0].revents != 0) pipe_.quiet();
    std::vector<PeerPtr> ready;
    for (std::size_t i = 0; i < peers.size(); ++i) {
      if (peers[i]->known_dead() || (found > 0 && fds[i + 1].revents != 0)) ready.push_back(peers[i]);
    }
    if (stop_.load(std::memory_order_seq_cst)) return;
    const std::vector<Death> deaths = look_at(ready);
    tell(deaths);
    answered = asked;
    answer_last_looks(answered);
    if (deaths.size() < ready.size()) std::this_thread::sleep_for(kAfterFalseAlarm);
  }
}

void PeerWatch::look() {
  std::vector<PeerPtr> dead;
  for (const PeerPtr& peer : to_watch()) {
    if (peer->dead()) dead.push_back(peer);
  }
  tell(look_at(dead));
}

std::vector<PeerWatch::Death> PeerWatch::look_at(const std::vector<PeerPtr>& peers) {
  std::vector<Death> deaths;
  const std::lock_guard lock(mutex_);
  for (const PeerPtr& peer : peers) {
    const auto found = watched_.find(peer);
    if (found == watched_.end() || found->second.done) continue;
    if (!peer->dead()) {
      // It ends just now, or somebody used the number of its descriptor for another file.
      found->second.done = ++found->second.false_alarms == kMostFalseAlarms;
      continue;
    }
    found->second.done = true;
    const auto& memberships = found->second.memberships;
    const std::int32_t status = peer->status();
    const bool in_order = std::all_of(memberships.begin(), memberships.end(),
                                      [&](const Membership& membership) { return has_left(membership, status); });
    deaths.push_back({found->second.job_rank, peer->identity(), status, peer->replaced(), in_order});
  }
  // Of several that died before this look, those that a launcher ended came last.
  std::stable_partition(deaths.begin(), deaths.end(), [](const Death& death) { return !is_terminated(death.status); });
  for (const Death& death : deaths) {
    if (box_) box_->say_death(death.job_rank, death.identity, death.status, death.replaced);
  }
  return deaths;
}

void PeerWatch::tell(const std::vector<Death>& deaths) {
  std::string folder;
  {
    const std::lock_guard lock(mutex_);
    for (const Death& death : deaths) failure_known_ |= death.in_order && is_failure(death.status);
    // A launcher ends the others when one has failed: those deaths are no news.
    if (failure_known_ || folder_.empty()) return;
    folder = folder_;
  }
  const auto first = std::find_if(deaths.begin(), deaths.end(),
                                  [](const Death& death) { return !death.in_order && is_failure(death.status); });
  if (first == deaths.end()) return;
  {
    const std::lock_guard lock(mutex_);
    failure_known_ = true;
  }
  const std::string text = "phalanx: rank " + std::to_string(first->job_rank) + " (pid " +
                           std::to_string(first->identity.pid) + ") " +
                           (first->replaced ? "replaced its program by calling exec" : describe(first->status)) +
                           "; all ranks: phalanx report " + printable(folder) + "\n";
  // A process that can't speak leaves it to another one.
  if (can_write_stderr() && claim(folder, text)) {
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  }
}

}  // namespace phalanx
