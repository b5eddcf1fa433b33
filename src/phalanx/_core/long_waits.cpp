#include "long_waits.hpp"

#include <algorithm>
#include <utility>

#include "per_process.hpp"

namespace phalanx {

namespace {

constinit PerProcess<LongWaits> g_long_waits;

}  // namespace

LongWaits& long_waits() { return g_long_waits.get(); }

std::uint64_t LongWaits::add(WaitingThread wait) {
  const std::lock_guard lock(mutex_);
  wait.id = ++last_id_;
  waits_.push_back(std::move(wait));
  return last_id_;
}

void LongWaits::remove(std::uint64_t id) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase_if(waits_, [&](const WaitingThread& wait) { return wait.id == id; });
}

std::vector<WaitingThread> LongWaits::all() const {
  const std::lock_guard lock(mutex_);
  return waits_;
}

}  // namespace phalanx
