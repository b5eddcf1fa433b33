// The system's futex, on words that other processes share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace phalanx {

using Clock = std::chrono::steady_clock;

// No sleep is longer, so that whoever waits can look around now and then.
inline constexpr std::chrono::milliseconds kLongestSleep{50};

// A word to sleep on, and the value it must still have.
struct Bell {
  std::atomic<std::uint32_t>* word;
  std::uint32_t value;
};

// False when a signal ended it.
bool futex_wait(const Bell& bell, std::chrono::nanoseconds timeout) noexcept;
// Sleeps until any of the bells rings. Where the system can't wait for so many words the sleep is short.
void futex_wait_any(const std::vector<Bell>& bells, std::chrono::nanoseconds timeout,
                    std::chrono::nanoseconds short_sleep = std::chrono::milliseconds(1)) noexcept;
void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept;
// Changes the word and wakes whoever sleeps on it.
void ring(std::atomic<std::uint32_t>& word) noexcept;

}  // namespace phalanx
