// What Python holds of a segment, and how it tells of processes.
#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "peers.hpp"
#include "segment.hpp"

namespace phalanx {

// A shared_ptr<Segment> made from a Python object would take the GIL wherever the last copy goes, and that may be the
// progress thread while the interpreter waits for it.
struct MappedSegment {
  std::shared_ptr<Segment> segment;
};

// Of a process: pid, start time and program.
using Pid = std::tuple<std::int64_t, std::uint64_t, std::uint64_t>;

inline Identity to_identity(const Pid& process) {
  const auto [pid, start, program] = process;
  return {static_cast<pid_t>(pid), start, program};
}

inline std::vector<Identity> to_identities(const std::vector<Pid>& processes) {
  std::vector<Identity> identities;
  for (const Pid& process : processes) identities.push_back(to_identity(process));
  return identities;
}

}  // namespace phalanx
