// A mapping of a group's segment: made by one rank, opened by its peers, unnamed as soon as possible.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "layout.hpp"

namespace phalanx {

using Nonce = std::array<std::uint8_t, 16>;

class Segment {
 public:
  // A sparse memfd that peers reach through /proc/<pid>/fd/<fd>; only touched pages cost memory.
  static Segment create_memfd(int size, const Tuning& tuning, const Nonce& nonce);
  // A file at `path` (mode 0600) with its space reserved, its slots shrunk until it fits. The caller unlinks it.
  static Segment create_file(const std::string& path, int size, Tuning tuning, const Nonce& nonce);
  // Maps the segment of a group of `size` ranks that a peer offers. The path comes from a store that others may write
  // to: throws std::runtime_error unless it is a sealed memfd or a file in /dev/shm, the effective user's own and
  // closed to others, with this nonce.
  static Segment open(const std::string& path, const Nonce& nonce, int size);
  // A mapping of zeroed private memory, for ranks that are threads of one process (the native stress test).
  static Segment create_private(int size, const Tuning& tuning);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  int fd() const noexcept { return fd_; }
  // Once every peer has mapped the segment the descriptor of a memfd is not needed any more.
  void close_fd() noexcept;
  // Makes sure that there is memory for the messages from one rank to another, before it is touched. False: there is
  // none. Nothing to do in a memfd.
  bool reserve_channel(int from, int to) noexcept;
  // True in a child of the process that mapped the segment: the mapping is not there.
  bool forked() const noexcept;

  Header& header() const noexcept { return *static_cast<Header*>(base_); }
  int size() const noexcept { return size_; }
  Control& control(int rank) const noexcept { return at<Control>(offsets_.control)[rank]; }
  WaitLine& wait_line(int rank) const noexcept { return at<WaitLine>(offsets_.wait)[rank]; }
  MessageLine& message_line(int rank) const noexcept { return at<MessageLine>(offsets_.message)[rank]; }
  LastWords& last_words(int rank) const noexcept { return at<LastWords>(offsets_.words)[rank]; }
  Answer& answer(int rank) const noexcept { return at<Answer>(offsets_.answers)[rank]; }
  RefusalLine& refusal(int rank, LaneKind kind) const noexcept {
    return at<RefusalLine>(
        offsets_.refusals)[static_cast<std::size_t>(rank) * kLaneKinds + static_cast<std::size_t>(kind)];
  }
  Testimony& testimony(std::uint32_t report, int rank) const noexcept {
    return at<Testimony>(
        offsets_.testimonies)[report * static_cast<std::uint32_t>(size_) + static_cast<std::uint32_t>(rank)];
  }
  LocationLine& location_line(int rank, std::uint32_t id) const noexcept {
    return at<LocationLine>(offsets_.locations)[static_cast<std::size_t>(rank) * kLocations + id % kLocations];
  }
  ChannelLines& channel_lines(int from, int to) const noexcept {
    return at<ChannelLines>(offsets_.lines)[channel(from, to)];
  }
  Envelope& envelope(int from, int to, std::uint64_t number) const noexcept {
    return at<Envelope>(offsets_.bodies + channel(from, to) * offsets_.body_stride)[number % kEnvelopes];
  }
  std::byte* message_chunk(int from, int to, std::uint64_t number) const noexcept {
    return at<std::byte>(offsets_.bodies + channel(from, to) * offsets_.body_stride + kEnvelopes * sizeof(Envelope) +
                         number % kChunks * header().tuning.message_chunk_bytes);
  }
  // Where the group only posts.
  PostLine& post_line(int rank) const noexcept { return at<PostLine>(offsets_.posts)[rank]; }
  PostEntry& post_entry(int rank, LaneKind kind, std::uint64_t number) const noexcept {
    const std::size_t ring = static_cast<std::size_t>(rank) * kLaneKinds + static_cast<std::size_t>(kind);
    return at<PostEntry>(offsets_.entries)[ring * kPostDepth + number % kPostDepth];
  }
  // What one side has posted of the messages from one rank to another.
  PairLine& pair_line(int from, int to, bool of_sender) const noexcept {
    const int owner = of_sender ? from : to, peer = of_sender ? to : from;
    const std::size_t row = static_cast<std::size_t>(owner) * 2 + (of_sender ? 0 : 1);
    return at<PairLine>(offsets_.pairs)[row * static_cast<std::size_t>(size_) + static_cast<std::size_t>(peer)];
  }
  // Where it moves bytes.
  Descriptor& descriptor(int rank, std::uint64_t seq) const noexcept {
    return at<Descriptor>(offsets_.descriptors)[static_cast<std::size_t>(rank) * kRing + seq % kRing];
  }
  std::uint64_t* sizes(int rank, std::uint64_t seq) const noexcept {
    return at<std::uint64_t>(offsets_.sizes +
                             (static_cast<std::size_t>(rank) * kRing + seq % kRing) * offsets_.sizes_stride);
  }
  std::byte* slot(int rank, std::uint64_t tick) const noexcept {
    return at<std::byte>(offsets_.staging + static_cast<std::size_t>(rank) * offsets_.staging_stride +
                         tick % kSlots * header().tuning.slot_bytes);
  }

 private:
  Segment(void* base, std::size_t bytes, int fd);
  static Segment map(int fd, std::size_t bytes);
  void format(int size, const Tuning& tuning, const Nonce& nonce);
  void release() noexcept;
  bool owns_fd() const noexcept;

  std::size_t channel(int from, int to) const noexcept {
    return static_cast<std::size_t>(from) * static_cast<std::size_t>(size_) + static_cast<std::size_t>(to);
  }
  template <class T>
  T* at(std::size_t offset) const noexcept {
    return reinterpret_cast<T*>(static_cast<std::byte*>(base_) + offset);
  }

  void* base_ = nullptr;
  std::size_t bytes_ = 0;
  int fd_ = -1;
  int size_ = 0;
  std::uint32_t generation_ = 0;
  // Of the file behind the descriptor.
  std::uint64_t inode_ = 0;
  std::uint64_t device_ = 0;
  Offsets offsets_{1, Tuning{}};
};

// Counts the forks in this process' ancestry since the library was loaded; a child sees another number.
std::uint32_t fork_generation() noexcept;

}  // namespace phalanx
