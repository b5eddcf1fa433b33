#include "posts.hpp"

#include <cstring>

namespace phalanx {

void write_entry(PostEntry& entry, std::uint64_t number, const PostEntry::Content& content) noexcept {
  std::uint64_t words[PostEntry::kWords] = {};
  std::memcpy(words, &content, sizeof(content));
  entry.number.store(0, std::memory_order_relaxed);
  // Whoever sees one of the new words also sees that the entry is being replaced.
  std::atomic_thread_fence(std::memory_order_release);
  for (std::size_t i = 0; i < PostEntry::kWords; ++i) entry.words[i].store(words[i], std::memory_order_relaxed);
  entry.number.store(number, std::memory_order_release);
}

std::optional<PostEntry::Content> read_entry(const PostEntry& entry, std::uint64_t number) noexcept {
  if (number == 0 || entry.number.load(std::memory_order_acquire) != number) return std::nullopt;
  std::uint64_t words[PostEntry::kWords];
  for (std::size_t i = 0; i < PostEntry::kWords; ++i) words[i] = entry.words[i].load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (entry.number.load(std::memory_order_relaxed) != number) return std::nullopt;
  PostEntry::Content content;
  std::memcpy(static_cast<void*>(&content), words, sizeof(content));
  return content;
}

}  // namespace phalanx
