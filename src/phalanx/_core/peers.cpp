#include "peers.hpp"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>

#include "futex.hpp"
#include "per_process.hpp"

namespace phalanx {

namespace {

// A process that leaves its groups because it ends shows soon how it ended: the interpreter of a program with torch
// takes half of this. Peers are promised an answer within a second.
constexpr std::chrono::milliseconds kTimeToEnd{850};

// How often a process whose pidfd says nothing is looked at closely.
constexpr std::chrono::milliseconds kBetweenLooks{250};

// Fields of /proc/<pid>/stat, numbered as proc(5) does.
struct Stat {
  char state;             // 3
  std::uint64_t flags;    // 9
  std::uint64_t threads;  // 20
  std::uint64_t start;    // 22
  std::uint64_t stack;    // 28: where the program's stack begins; 0: it has no memory any more, or does not show it
  std::int32_t status;    // 52
};

// PF_EXITING of <linux/sched.h>: the main thread is past the point from which it only ends.
constexpr std::uint64_t kExiting = 0x4;

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
    if (number == 9) stat.flags = std::stoull(field);
    if (number == 20) stat.threads = std::stoull(field);
    if (number == 22) stat.start = std::stoull(field);
    if (number == 28) stat.stack = std::stoull(field);
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

// A pidfd of whatever process, not of another kind of file.
bool is_pidfd(int fd) noexcept {
  siginfo_t info;
  const auto id = static_cast<id_t>(fd);
  // P_PIDFD, which older headers lack.
  return ::waitid(static_cast<idtype_t>(3), id, &info, WEXITED | WNOHANG | WNOWAIT) == 0 || errno == ECHILD;
}

struct Watched {
  std::mutex mutex;
  std::map<std::tuple<pid_t, std::uint64_t, std::uint64_t>, std::weak_ptr<Peer>> peers;
};

constinit PerProcess<Watched> g_watched;

// To read it the kernel walks through all threads of the process: with hundreds of ranks that are threads, each of them
// would pay for all.
struct Own {
  Identity identity = [] {
    const pid_t pid = ::getpid();
    const std::optional<Stat> stat = read_stat(pid);
    return Identity{pid, stat ? stat->start : 0, stat ? stat->stack : 0};
  }();
};

PerProcess<Own> g_own;

}  // namespace

Identity own_identity() { return g_own.get().identity; }

std::shared_ptr<Peer> Peer::watch(const Identity& identity) {
  if (identity.pid <= 0 || identity.pid == ::getpid()) return nullptr;
  Watched& all = g_watched.get();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.peers, [](const auto& entry) { return entry.second.expired(); });
  auto& entry = all.peers[{identity.pid, identity.start, identity.program}];
  std::shared_ptr<Peer> peer = entry.lock();
  if (peer) return peer;
  const int pidfd = static_cast<int>(::syscall(SYS_pidfd_open, identity.pid, 0));
  // A peer that goes unwatched because a limit was hit would die unnoticed.
  if (pidfd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) {
    throw std::system_error(errno, std::generic_category(), "pidfd_open of process " + std::to_string(identity.pid));
  }
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

std::vector<std::shared_ptr<Peer>> Peer::watch_all(const std::vector<Identity>& identities) {
  std::vector<std::shared_ptr<Peer>> peers;
  for (const Identity& identity : identities) peers.push_back(watch(identity));
  return peers;
}

Peer::Peer(const Identity& identity, int pidfd, bool dead)
    : identity_(identity), pidfd_(pidfd), fate_(dead ? Fate::ended : Fate::alive) {}

Peer::~Peer() {
  // The number may be that of a file of the program by now.
  const int pidfd = pidfd_.load(std::memory_order_relaxed);
  if (pidfd >= 0 && is_pidfd(pidfd)) ::close(pidfd);
}

// `fired`: the pidfd, or what has its number by now, says that the process has ended, or that it is not open.
Peer::Fate Peer::find_fate(bool fired) const noexcept {
  try {
    const std::optional<Stat> stat = read_stat(identity_.pid);
    if (!stat) {
      const bool exists = ::kill(identity_.pid, 0) == 0 || errno != ESRCH;
      return !exists || (fired && is_pidfd(pidfd_.load(std::memory_order_relaxed))) ? Fate::ended : Fate::alive;
    }
    if (identity_.start != 0 && stat->start != identity_.start) return Fate::ended;
    // A main thread may end before the other threads of its process.
    const bool is_zombie = stat->state == 'Z' || stat->state == 'X';
    if (is_zombie) return stat->threads > 1 ? Fate::alive : Fate::ended;
    if (identity_.program != 0 && stat->stack != 0 && stat->stack != identity_.program) return Fate::replaced;
  } catch (const std::exception&) {
  }
  return Fate::alive;
}

bool Peer::dead() noexcept {
  if (known_dead()) return true;
  pollfd poll_fd{pidfd_.load(std::memory_order_relaxed), POLLIN, 0};
  const bool fired = ::poll(&poll_fd, 1, 0) > 0;
  const auto now = Clock::now().time_since_epoch().count();
  if (!fired && now < next_look_.load(std::memory_order_relaxed)) return false;
  const std::lock_guard lock(mutex_);
  if (known_dead()) return true;
  next_look_.store(now + Clock::duration(kBetweenLooks).count(), std::memory_order_relaxed);
  const Fate fate = find_fate(fired);
  if (fate == Fate::alive) {
    // The number belongs to another file now, or to none: that file is not ours to close.
    if (fired) pidfd_.store(static_cast<int>(::syscall(SYS_pidfd_open, identity_.pid, 0)), std::memory_order_relaxed);
    return false;
  }
  if (fate == Fate::ended) status();  // before the parent collects it, where that is the only chance
  fate_.store(fate, std::memory_order_release);
  return true;
}

bool Peer::ending() noexcept {
  if (dead()) return true;
  try {
    const std::optional<Stat> stat = read_stat(identity_.pid);
    // Without its entry it has been collected since, or the entry can't be read.
    if (!stat) return ::kill(identity_.pid, 0) != 0 && errno == ESRCH;
    return (identity_.start != 0 && stat->start != identity_.start) || (stat->flags & kExiting) != 0;
  } catch (const std::exception&) {
  }
  return false;
}

std::string Peer::command_line() const {
  std::ifstream file("/proc/" + std::to_string(identity_.pid) + "/cmdline");
  std::string text;
  std::getline(file, text);
  while (!text.empty() && text.back() == '\0') text.pop_back();
  const auto is_unprintable = [](unsigned char c) { return c < ' ' || c >= 0x7f; };
  std::replace(text.begin(), text.end(), '\0', ' ');
  std::replace_if(text.begin(), text.end(), is_unprintable, '?');
  return text;
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
  const int pidfd = pidfd_.load(std::memory_order_relaxed);
  if (found != kUnknownStatus || pidfd < 0) return found;
  // A process that waits to be collected shows its status in /proc, one that has been collected in its pidfd.
  try {
    const std::optional<Stat> stat = read_stat(identity_.pid);
    if (stat && stat->start == identity_.start && stat->state == 'Z') found = stat->status;
  } catch (const std::exception&) {
  }
  if (found == kUnknownStatus && is_pidfd(pidfd)) {
    PidfdInfo info{};
    info.mask = kPidfdInfoExit;
    if (::ioctl(pidfd, kPidfdGetInfo, &info) == 0 && (info.mask & kPidfdInfoExit) != 0) found = info.exit_code;
  }
  status_.store(found, std::memory_order_relaxed);
  return found;
}

}  // namespace phalanx
