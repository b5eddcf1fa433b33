// Agreements, for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "bind_segment.hpp"
#include "member.hpp"

namespace phalanx {

// A rank's place in a group that only posts. Throws where the segment is for something else.
std::shared_ptr<Member> member_for_posting(const MappedSegment& mapped, int rank);
// Throws unless the group has that rank.
void check_rank(const Member& member, int rank);

// Of ranks that are processes.
void bind_agreement(nanobind::module_& module);
// Of ranks that are threads of this process.
void bind_local_agreement(nanobind::module_& module);

}  // namespace phalanx
