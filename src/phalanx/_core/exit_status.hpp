// Tells peers with which code this process ends, while it is still going down: that may take longer than they wait.
#pragma once

#include <memory>

#include "black_box.hpp"
#include "segment.hpp"

namespace phalanx {

// The process is about to end, and this was its last group as that rank. Where the system can't say, peers see the
// process' end itself.
void tell_exit_status(std::shared_ptr<Segment> segment, Seat seat);
// The same for the black box of this process, whenever it ends.
void tell_exit_status(std::shared_ptr<BlackBox> box);

}  // namespace phalanx
