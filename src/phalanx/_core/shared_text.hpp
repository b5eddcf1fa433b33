// Text in shared memory with one writer, which others may read at any time: they get all of one text or nothing.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace phalanx {

// As much of the text as fits into `room` bytes, without the first half of a character of several bytes at its end.
inline std::string_view cut(std::string_view text, std::size_t room) noexcept {
  std::size_t size = std::min(text.size(), room);
  while (size < text.size() && size > 0 && (static_cast<unsigned char>(text[size]) & 0xc0) == 0x80) --size;
  return text.substr(0, size);
}

// Into an array of characters, ended by a zero.
template <std::size_t kSize>
void copy_text(char (&to)[kSize], std::string_view text) noexcept {
  text = cut(text, kSize - 1);
  std::memcpy(to, text.data(), text.size());
  to[text.size()] = 0;
}

template <std::size_t kWords>
struct SharedText {
  static constexpr std::size_t kRoom = kWords * sizeof(std::uint64_t) - 1;

  std::atomic<std::uint32_t> version;  // odd while the text is being written; 0: there was none
  std::atomic<std::uint64_t> words[kWords];

  void write(std::string_view text) noexcept {
    text = cut(text, kRoom);
    const std::uint32_t before = version.load(std::memory_order_relaxed);
    version.store(before + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    for (std::size_t i = 0; i * sizeof(std::uint64_t) <= text.size(); ++i) {
      std::uint64_t word = 0;
      const std::string_view part = text.substr(i * sizeof(word), sizeof(word));
      std::memcpy(&word, part.data(), part.size());
      words[i].store(word, std::memory_order_relaxed);
    }
    version.store(before + 2, std::memory_order_release);
  }

  std::string read() const {
    constexpr int kTries = 100;
    for (int tries = 0; tries < kTries; ++tries) {
      const std::uint32_t before = version.load(std::memory_order_acquire);
      if (before == 0) break;
      char text[kWords * sizeof(std::uint64_t)];
      for (std::size_t i = 0; i < kWords; ++i) {
        const std::uint64_t word = words[i].load(std::memory_order_relaxed);
        std::memcpy(text + i * sizeof(word), &word, sizeof(word));
      }
      std::atomic_thread_fence(std::memory_order_acquire);
      if (before % 2 == 0 && version.load(std::memory_order_relaxed) == before) {
        return {text, ::strnlen(text, sizeof(text))};
      }
    }
    return {};
  }
};

}  // namespace phalanx
