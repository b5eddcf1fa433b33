// A mapping of a group's segment: made by one rank, opened by its peers, unnamed as soon as possible.
//
// What lies in it is reached by seat. Who knows a rank asks for its seat, once and as late as possible.
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
  static Segment create_memfd(const Seating& seating, const Tuning& tuning, const Nonce& nonce);
  // A file at `path` (mode 0600) with its space reserved, its slots shrunk until it fits. The caller unlinks it.
  static Segment create_file(const std::string& path, const Seating& seating, Tuning tuning, const Nonce& nonce);
  // Maps the segment of a group of `size` ranks that a peer offers. The path comes from a store that others may write
  // to: throws std::runtime_error unless it is a sealed memfd or a file in /dev/shm, the effective user's own and
  // closed to others, with this nonce.
  static Segment open(const std::string& path, const Nonce& nonce, int size);
  // A mapping of zeroed private memory, for ranks that are threads of one process.
  static Segment create_private(const Seating& seating, const Tuning& tuning);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  int fd() const noexcept { return fd_; }
  // Once every peer has mapped the segment the descriptor of a memfd is not needed any more.
  void close_fd() noexcept;
  // Makes sure that there is memory for the messages from one seat to another, before it is touched. False: there is
  // none. Nothing to do in a memfd.
  bool reserve_channel(Seat from, Seat to) noexcept;
  // True in a child of the process that mapped the segment: the mapping is not there.
  bool forked() const noexcept;

  Header& header() const noexcept { return *static_cast<Header*>(base_); }
  int size() const noexcept { return size_; }
  // This process' own copy, checked when the segment was opened.
  const Seating& seating() const noexcept { return seating_; }
  Seats seats() const noexcept { return Seats(size_); }
  Seat seat_of(int rank) const noexcept { return seating_.seat_of(rank); }
  int rank_at(Seat seat) const noexcept { return seating_.rank_at(seat); }
  Control& control(Seat seat) const noexcept { return at<Control>(offsets_.control)[index_of(seat)]; }
  WaitLine& wait_line(Seat seat) const noexcept { return at<WaitLine>(offsets_.wait)[index_of(seat)]; }
  MessageLine& message_line(Seat seat) const noexcept { return at<MessageLine>(offsets_.message)[index_of(seat)]; }
  LastWords& last_words(Seat seat) const noexcept { return at<LastWords>(offsets_.words)[index_of(seat)]; }
  Answer& answer(Seat seat) const noexcept { return at<Answer>(offsets_.answers)[index_of(seat)]; }
  RefusalLine& refusal(Seat seat, LaneKind kind) const noexcept {
    return at<RefusalLine>(offsets_.refusals)[index_of(seat) * kLaneKinds + static_cast<std::size_t>(kind)];
  }
  Testimony& testimony(std::uint32_t report, Seat seat) const noexcept {
    return at<Testimony>(
        offsets_.testimonies)[report * static_cast<std::uint32_t>(size_) + static_cast<std::uint32_t>(seat)];
  }
  LocationLine& location_line(Seat seat, std::uint32_t id) const noexcept {
    return at<LocationLine>(offsets_.locations)[index_of(seat) * kLocations + id % kLocations];
  }
  ChannelLines& channel_lines(Seat from, Seat to) const noexcept {
    return at<ChannelLines>(offsets_.lines)[channel(from, to)];
  }
  Envelope& envelope(Seat from, Seat to, std::uint64_t number) const noexcept {
    return at<Envelope>(offsets_.bodies + channel(from, to) * offsets_.body_stride)[number % kEnvelopes];
  }
  std::byte* message_chunk(Seat from, Seat to, std::uint64_t number) const noexcept {
    return at<std::byte>(offsets_.bodies + channel(from, to) * offsets_.body_stride + kEnvelopes * sizeof(Envelope) +
                         number % kChunks * header().tuning.message_chunk_bytes);
  }
  // Where the group only posts.
  PostLine& post_line(Seat seat) const noexcept { return at<PostLine>(offsets_.posts)[index_of(seat)]; }
  PostEntry& post_entry(Seat seat, LaneKind kind, std::uint64_t number) const noexcept {
    const std::size_t ring = index_of(seat) * kLaneKinds + static_cast<std::size_t>(kind);
    return at<PostEntry>(offsets_.entries)[ring * kPostDepth + number % kPostDepth];
  }
  // What one side has posted of the messages from one seat to another.
  PairLine& pair_line(Seat from, Seat to, bool of_sender) const noexcept {
    const Seat owner = of_sender ? from : to, peer = of_sender ? to : from;
    const std::size_t row = index_of(owner) * 2 + (of_sender ? 0 : 1);
    return at<PairLine>(offsets_.pairs)[row * static_cast<std::size_t>(size_) + index_of(peer)];
  }
  // Where it moves bytes.
  Descriptor& descriptor(Seat seat, std::uint64_t seq) const noexcept {
    return at<Descriptor>(offsets_.descriptors)[index_of(seat) * kRing + seq % kRing];
  }
  std::uint64_t* sizes(Seat seat, std::uint64_t seq) const noexcept {
    return at<std::uint64_t>(offsets_.sizes + (index_of(seat) * kRing + seq % kRing) * offsets_.sizes_stride);
  }
  std::byte* slot(Seat seat, std::uint64_t tick) const noexcept {
    return at<std::byte>(offsets_.staging + index_of(seat) * offsets_.staging_stride +
                         tick % kSlots * header().tuning.slot_bytes);
  }

 private:
  Segment(void* base, std::size_t bytes, int fd);
  static Segment map(int fd, std::size_t bytes);
  void format(const Seating& seating, const Tuning& tuning, const Nonce& nonce);
  void release() noexcept;
  bool owns_fd() const noexcept;

  std::size_t channel(Seat from, Seat to) const noexcept {
    return index_of(from) * static_cast<std::size_t>(size_) + index_of(to);
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
  Seating seating_{0};
};

// Counts the forks in this process' ancestry since the library was loaded; a child sees another number.
std::uint32_t fork_generation() noexcept;

}  // namespace phalanx
