// Which CPUs this process may use: what decides whether the ranks of a host can spin.
#pragma once

#include <vector>

namespace phalanx {

// The numbers of the CPUs in the affinity mask.
std::vector<int> affinity();

// The tightest CPU quota of the cgroups around this process in CPUs, rounded up; 0 where there is none.
int cpu_quota();

}  // namespace phalanx
