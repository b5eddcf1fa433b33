#include "cpus.hpp"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

namespace phalanx {

namespace {

// Quota over period of a cgroup v2 cpu.max file, rounded up; 0 where there is no limit.
int quota_of(const std::string& path) {
  std::ifstream file(path);
  std::string quota;
  long period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
  std::istringstream number(quota);
  long value = 0;
  if (!(number >> value) || value <= 0) return 0;
  return static_cast<int>((value + period - 1) / period);
}

int quota_v1() {
  long quota = 0;
  long period = 0;
  std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return 0;
  return static_cast<int>((quota + period - 1) / period);
}

}  // namespace

std::vector<int> affinity() {
  std::vector<int> cpus;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(static_cast<std::size_t>(cpu), &set)) cpus.push_back(cpu);
    }
  }
  if (cpus.empty()) {  // more CPUs than the mask has room for: none is excluded
    for (unsigned cpu = 0; cpu < std::max(std::thread::hardware_concurrency(), 1u); ++cpu)
      cpus.push_back(static_cast<int>(cpu));
  }
  return cpus;
}

int cpu_quota() {
  std::string path;
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("0::", 0) == 0) path = line.substr(3);
  }
  int tightest = quota_v1();
  while (true) {
    const int quota = quota_of("/sys/fs/cgroup" + path + "/cpu.max");
    if (quota > 0) tightest = tightest == 0 ? quota : std::min(tightest, quota);
    if (path.empty() || path == "/") return tightest;
    path.erase(path.rfind('/'));
  }
}

}  // namespace phalanx
