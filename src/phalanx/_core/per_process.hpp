// What a process has one of.
#pragma once

#include <atomic>
#include <cstdint>

#include "segment.hpp"

namespace phalanx {

// Made at first use and never destroyed: threads may use it until the process ends. A forked child gets another one, as
// it must not touch what a thread of its parent may hold locked.
template <class T>
class PerProcess {
 public:
  T& get() {
    Made* made = current_.load(std::memory_order_acquire);
    while (made == nullptr || made->generation != fork_generation()) {
      auto* fresh = new Made{fork_generation(), {}};
      if (current_.compare_exchange_strong(made, fresh, std::memory_order_acq_rel)) return fresh->value;
      delete fresh;
    }
    return made->value;
  }

 private:
  struct Made {
    std::uint32_t generation;
    T value;
  };
  std::atomic<Made*> current_{nullptr};
};

}  // namespace phalanx
