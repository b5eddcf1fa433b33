#include "front_lazy.hpp"

#include <algorithm>
#include <string>

#include "memory.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

constexpr std::size_t kObjectBytes = 64;
constexpr std::size_t kImplementationBytes = 256;

// Per sample, the bytes that the pointer at an offset of the Python object leads to. Empty: not all of them are
// pointers.
std::vector<std::string> implementations_at(const std::vector<LazySample>& samples, std::size_t offset) {
  std::vector<std::string> found;
  for (const LazySample& sample : samples) {
    const std::string object = readable_bytes(sample.tensor.ptr(), kObjectBytes);
    const char* address = nullptr;
    if (object.size() < offset + sizeof(address)) return {};
    std::memcpy(&address, object.data() + offset, sizeof(address));
    std::string bytes = readable_bytes(address, kImplementationBytes);
    if (bytes.empty()) return {};
    found.push_back(std::move(bytes));
  }
  return found;
}

}  // namespace

std::optional<LazyBits> LazyBits::learn(const std::vector<LazySample>& samples) {
  LazyBits learned;
  int num_neg = 0, num_conj = 0;
  std::size_t pointer_of_conj = 0;
  for (std::size_t pointer = 0; pointer < kObjectBytes; pointer += sizeof(void*)) {
    const std::vector<std::string> memories = implementations_at(samples, pointer);
    if (memories.empty()) continue;
    std::size_t num_bytes = kImplementationBytes;
    for (const std::string& memory : memories) num_bytes = std::min(num_bytes, memory.size());
    // Whether the bit is set in exactly those samples that have the property.
    const auto tells = [&](std::size_t offset, unsigned mask, bool LazySample::* property) {
      for (std::size_t i = 0; i < samples.size(); ++i) {
        if (((static_cast<unsigned char>(memories[i][offset]) & mask) != 0) != samples[i].*property) return false;
      }
      return true;
    };
    for (std::size_t offset = 0; offset < num_bytes; ++offset) {
      for (unsigned mask = 1; mask < 256; mask <<= 1) {
        const Bit bit{offset, static_cast<char>(mask)};
        if (tells(offset, mask, &LazySample::is_neg)) {
          learned.neg_ = bit;
          learned.pointer_ = pointer;
          ++num_neg;
        }
        if (tells(offset, mask, &LazySample::is_conj)) {
          learned.conj_ = bit;
          pointer_of_conj = pointer;
          ++num_conj;
        }
      }
    }
  }
  if (num_neg != 1 || num_conj != 1 || learned.pointer_ != pointer_of_conj) return std::nullopt;
  return learned;
}

}  // namespace phalanx
