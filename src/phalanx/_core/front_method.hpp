// Methods of a group that torch calls without a Python frame of ours.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "bind_calls.hpp"
#include "front_tensors.hpp"

namespace phalanx {

// One side of a message, as the core takes it.
std::shared_ptr<MessageTicket> message_of(const TensorView& tensor, bool sends, int peer, std::uint32_t tag);

void bind_front_method(nanobind::module_& module);

}  // namespace phalanx
