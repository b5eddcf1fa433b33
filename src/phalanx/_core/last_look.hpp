// One more look at the peers before SIGTERM ends this process.
//
// A launcher that sees a rank die sends SIGTERM to the other ranks at once, maybe before their watchers have noticed
// the death. Then no black box says who died first. So, while the program leaves SIGTERM to the system, a handler of
// ours asks the watcher to look, waits a moment for the answer, and then lets SIGTERM end the process. A program that
// has a handler of its own keeps it. The handler uses only what is safe in a signal handler: atomics, fstat(), write()
// and poll().
#pragma once

#include <cstdint>

#include "wake_pipe.hpp"

namespace phalanx {

// From now on the handler writes to this pipe to ask for a look. Installs the handler if SIGTERM has its default
// action. One watcher per process.
void offer_last_look(const WakePipe& pipe) noexcept;
// When this returns, no handler uses the pipe any more.
void withdraw_last_look() noexcept;
// The number of looks asked for so far; the watcher takes it before it looks, and answers with it afterwards.
std::uint32_t num_last_looks() noexcept;
void answer_last_looks(std::uint32_t number) noexcept;

}  // namespace phalanx
