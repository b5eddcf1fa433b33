#include "peers.hpp"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "futex.hpp"
#include "per_process.hpp"

namespace phalanx {

namespace {

// A process that leaves its groups because it ends shows soon how it ended: the interpreter of a program with torch
// takes half of this. Peers are promised an answer within a second.
constexpr std::chrono::milliseconds kTimeToEnd{850};

// Fields of /proc/<pid>/stat, numbered as proc(5) does.
struct Stat {
  char state;           // 3
  std::uint64_t start;  // 22
  std::int32_t status;  // 52
};

std::optional<Stat> read_stat(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  // The name in field 2 may hold anything; what follows its last parenthesis does not.
  const std::size_t end = line.rfind(')');
  if (end == std::string::npos) return std::nullopt;
  std::istringstream rest(line.substr(end + 1));
  Stat stat{};
  std::string field;
  for (int number = 3; rest >> field; ++number) {
    if (number == 3) stat.state = field[0];
    if (number == 22) stat.start = std::stoull(field);
    if (number == 52) stat.status = std::stoi(field);
  }
  return stat;
}

// As in newer versions of <linux/pidfd.h>: tells how a process ended after its parent has collected it.
struct PidfdInfo {
  std::uint64_t mask;
  std::uint64_t cgroup;
  std::uint32_t ids[11];
  std::int32_t exit_code;
};
static_assert(sizeof(PidfdInfo) == 64);
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);
constexpr std::uint64_t kPidfdInfoExit = 1 << 3;

struct Watched {
  std::mutex mutex;
  std::map<std::pair<pid_t, std::uint64_t>, std::weak_ptr<Peer>> peers;
};

constinit PerProcess<Watched> g_watched;

}  // namespace

Identity own_identity() {
  const pid_t pid = ::getpid();
  const std::optional<Stat> stat = read_stat(pid);
  return {pid, stat ? stat->start : 0};
}

std::shared_ptr<Peer> Peer::watch(const Identity& identity) {
  if (identity.pid <= 0 || identity.pid == ::getpid()) return nullptr;
  Watched& all = g_watched.get();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.peers, [](const auto& entry) { return entry.second.expired(); });
  auto& entry = all.peers[{identity.pid, identity.start}];
  std::shared_ptr<Peer> peer = entry.lock();
  if (peer) return peer;
  const int pidfd = static_cast<int>(::syscall(SYS_pidfd_open, identity.pid, 0));
  if (pidfd < 0 && errno != ESRCH) return nullptr;
  const std::optional<Stat> stat = read_stat(identity.pid);
  // What can't be read says nothing.
  const bool is_another = stat && identity.start != 0 && stat->start != identity.start;
  const bool dead = pidfd < 0 || is_another;
  if (dead && pidfd >= 0) ::close(pidfd);
  peer = std::make_shared<Peer>(identity, dead ? -1 : pidfd, dead);
  entry = peer;
  return peer;
}

Peer::~Peer() {
  if (pidfd_ >= 0) ::close(pidfd_);
}

bool Peer::dead() noexcept {
  if (known_dead()) return true;
  pollfd poll_fd{pidfd_, POLLIN, 0};
  if (::poll(&poll_fd, 1, 0) <= 0 || (poll_fd.revents & POLLIN) == 0) return false;
  status();  // before the parent collects it, where that is the only chance
  dead_.store(true, std::memory_order_release);
  return true;
}

bool Peer::ended_or_late() noexcept {
  if (dead()) return true;
  const auto now = Clock::now().time_since_epoch();
  Clock::rep first = 0;
  if (first_asked_.compare_exchange_strong(first, now.count(), std::memory_order_relaxed)) return false;
  return now - Clock::duration(first) > kTimeToEnd;
}

std::int32_t Peer::status() noexcept {
  std::int32_t found = status_.load(std::memory_order_relaxed);
  if (found != kUnknownStatus || pidfd_ < 0) return found;
  // A process that waits to be collected shows its status in /proc, one that has been collected in its pidfd.
  try {
    const std::optional<Stat> stat = read_stat(identity_.pid);
    if (stat && stat->start == identity_.start && stat->state == 'Z') found = stat->status;
  } catch (const std::exception&) {
  }
  if (found == kUnknownStatus) {
    PidfdInfo info{};
    info.mask = kPidfdInfoExit;
    if (::ioctl(pidfd_, kPidfdGetInfo, &info) == 0 && (info.mask & kPidfdInfoExit) != 0) found = info.exit_code;
  }
  status_.store(found, std::memory_order_relaxed);
  return found;
}

}  // namespace phalanx
