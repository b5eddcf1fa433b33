// The thread that carries on with calls nobody waits for. One a process, started when it is first needed.
//
// It holds a lane only while there is something to do in it, sleeps until a bell of any lane rings, and never spins:
// the CPUs belong to the program.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lane.hpp"

namespace phalanx {

class Progress {
 public:
  // Lanes that are to be tended whenever something is pending in them.
  void add(std::shared_ptr<Lane> lane);
  // The lane is left alone from its next turn on. With the last lane the thread ends.
  void remove(const std::shared_ptr<Lane>& lane);
  // Something is pending in some lane.
  void wake();

 private:
  void start();
  void run();

  std::mutex lanes_mutex_;
  std::vector<std::shared_ptr<Lane>> lanes_;
  std::mutex thread_mutex_;  // taken before the other
  std::thread thread_;
  std::atomic<bool> running_{false};
  std::atomic<bool> stop_{false};

  std::atomic<std::uint32_t> bell_{0};
  std::atomic<bool> asleep_{false};
};

// That of this process.
Progress& progress();

}  // namespace phalanx
