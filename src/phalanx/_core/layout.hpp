// What lies where in a group's segment. Plain data and atomics only, the same in every process that maps it.
//
//   Header | i32 ranks[size] | Control[size] | WaitLine[size] | MessageLine[size] | LastWords[size] | Answer[size] |
//   RefusalLine[size][kLaneKinds] | Testimony[kReports][size] | LocationLine[size][kLocations] |
//
// and then, where the group moves bytes,
//
//   Descriptor[size][kRing] | u64 sizes[size][kRing][2 * size + 2] | ChannelLines[size][size] | staging[size] | channel
//   bodies[size][size]
//
// or, where it only posts its calls and another engine moves the bytes (agreement.hpp),
//
//   PostLine[size] | PostEntry[size][kLaneKinds][kPostDepth] | PairLine[size][2][size]
//
// Arrays are indexed by seat (seats.hpp); `ranks` says which rank has which seat. Only what `sizes` has of a call is in
// the order of ranks.
//
// Ownership: every Control, WaitLine, LastWords, RefusalLine, LocationLine, Descriptor, sizes, staging area, PostLine,
// PostEntry and PairLine has one writer, its rank; of a channel's lines one is the sender's and one the receiver's, its
// body is the sender's. The Header's immutable part and `ranks` are written by the creator before anyone maps it; the
// rest of it and the MessageLines are shared and atomic. A Failure and its Testimonies belong to the rank that claims
// that report; of an Answer its rank writes the text, everybody asks.
//
// Channel bodies cost nothing before their first use: a memfd is sparse, and in a file their space is not reserved
// until a sender asks for it (Segment::reserve_channel).
//
// Time is counted in ticks. Every collective takes the same number of ticks (at least one) on every rank, so all ranks
// number them alike. In tick t a rank uses its staging slot t % kSlots. The counters say how many ticks a rank has
// staged, combined and done; a slot, a ring word and a descriptor are reused only when every reader is done with them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "description.hpp"
#include "seats.hpp"
#include "shared_text.hpp"

namespace phalanx {

inline constexpr std::uint64_t kMagic = 0x31584e414c414850;  // "PHALANX1"
inline constexpr std::uint32_t kVersion = 11;
inline constexpr int kSlots = 4;
// Twice the slots: a peer that lags by kSlots ticks still finds its word when it compares (see Call::verify_history).
inline constexpr int kRing = 2 * kSlots;
inline constexpr std::size_t kLine = 128;
inline constexpr std::size_t kPage = 4096;
// Of the first page and the second: the memory of all reports of a failure is part of the header.
inline constexpr std::size_t kHeaderBytes = 2 * kPage;
inline constexpr int kMaxRanks = 1024;
// Of a channel: announcements under way, grants under way, chunks under way.
inline constexpr int kEnvelopes = 16;
inline constexpr int kGrants = 8;
inline constexpr int kChunks = 4;
// A message up to this size travels in its envelope.
inline constexpr std::size_t kEnvelopeBytes = 2048;
inline constexpr std::size_t kInlineBytes = kEnvelopeBytes - 64;

// Places in the program whose text a rank keeps for its peers.
inline constexpr std::uint32_t kLocations = 64;

// Rings of the words of posted calls (posting.hpp): so deep that reports find calls in them, and so many that a rank
// which goes on may be behind by any number of calls. For messages: few, since there are some for every two ranks.
inline constexpr int kPostDepthBits = 5, kPostLevels = 9, kPostDepth = 1 << kPostDepthBits;
inline constexpr int kPairDepthBits = 1, kPairLevels = 7;
// A rank keeps so many of its own words, per level, in its own memory (comparing.hpp).
inline constexpr int kKeptPostBits = 12, kKeptPairBits = 8;

// How much is compared between ranks.
enum class Check : std::uint32_t { off = 0, on = 1, full = 2 };

enum class FailureKind : std::uint32_t {
  none = 0,
  mismatch = 1,
  timeout = 2,
  aborted = 3,
  left = 4,     // a rank left the group in order while it was still needed
  lost = 5,     // a rank's process died
  message = 6,  // a message does not fit its receive
};

// How a rank left.
enum class Leaving : std::uint32_t {
  no = 0,
  closed = 1,
  exiting = 2,
  replaced = 3,  // its process called exec; found by others
};

// What a rank takes no further part in once it has seen that the group is broken.
enum class GaveUp : std::uint32_t { calls = 1, messages = 2 };

// The lanes of a group (lane.hpp).
enum class LaneKind : std::uint32_t { calls = 0, messages = 1 };
inline constexpr std::size_t kLaneKinds = 2;

inline constexpr std::int32_t kUnknownStatus = -1;

// Bytes of a text that says where in the program a call was made.
inline constexpr std::size_t kWhereBytes = 120;

// Tags that a failure keeps of messages that nobody receives: more than an error lists.
inline constexpr std::uint32_t kTagsKept = 24;

// The sender's side of a message that does not fit its receive.
struct Misfit {
  Description sent;
  char where[kWhereBytes];
  // Where messages come in another order: the number of another message of one side that fits this one of the other
  // side; 0: none is known.
  std::uint64_t fitting_seq = 0;
  std::uint32_t is_sent_fitting = 0;  // 1: what was sent fits that receive; 0: what is received fits that message
};

// Two ranks of which one sends, in a call that exchanges sizes, what the other does not expect.
struct Splits {
  std::int32_t sender = kNoRank;
  std::int32_t receiver = kNoRank;
  std::int64_t bytes_sent = 0;
  std::int64_t bytes_expected = 0;
};

// Reports of the first failure that may be begun: each further one by a rank that takes over, because the rank before
// it died or is held up.
inline constexpr std::uint32_t kReports = 4;

// Who reports the first failure, and how far that rank has got: one word, so that one rank at a time reports.
class ReportState {
 public:
  constexpr explicit ReportState(std::uint32_t word) noexcept : word_(word) {}
  static constexpr ReportState claimed(std::uint32_t report, int rank) noexcept {
    return ReportState(1 | report << 2 | static_cast<std::uint32_t>(rank) << 8);
  }
  static constexpr ReportState published(std::uint32_t report) noexcept { return ReportState(2 | report << 2); }
  constexpr std::uint32_t word() const noexcept { return word_; }
  constexpr bool is_claimed() const noexcept { return (word_ & 3) == 1; }
  constexpr bool is_published() const noexcept { return (word_ & 3) == 2; }
  constexpr std::uint32_t report() const noexcept { return word_ >> 2 & 63; }
  constexpr int claimer() const noexcept { return static_cast<int>(word_ >> 8); }

 private:
  std::uint32_t word_;
};

// The first failure of a group, frozen by the rank that reports it between its claim and its publishing.
struct Failure {
  FailureKind kind = FailureKind::none;
  std::int32_t rank = kNoRank;  // who found it
  Description call;             // what the finder was doing
  std::uint64_t seq = 0;
  char where[kWhereBytes] = {};  // the finder's line in the program
  std::int32_t peer = kNoRank;   // the other side of a mismatch or message; the rank that left or died
  // Of a mismatch: the last call up to which the finder and `peer` are known to agree. The first that differs comes
  // after it, and is `seq` at the latest.
  std::uint64_t agreed = 0;
  // Of a mismatch about sizes that ranks exchange.
  Splits splits;
  // The same, where it is not known which ranks do not fit.
  std::uint32_t sizes_differ = 0;
  // Of a message that does not fit; `call` is its receive.
  Misfit misfit = {};
  // Of a timeout.
  std::uint64_t missing[kMaxRanks / 64] = {};  // a bit for each rank
  std::uint32_t asked = 0;                     // 1: just before, the missing ranks were asked where they are
  // The lowest tags of messages that came instead of the one that is missing.
  std::uint32_t other_tags[kTagsKept] = {};
  std::uint32_t num_other_tags = 0;
  // Of a rank that left or died.
  Leaving leaving = Leaving::no;
  std::int32_t status = kUnknownStatus;  // how its process ended, as waitpid gives it
  char command_line[256] = {};           // of the program that has replaced its own
  // Of an abort.
  char reason[768] = {};

  void add_missing(int rank) noexcept { missing[rank / 64] |= std::uint64_t{1} << rank % 64; }
  void add_other_tag(std::uint32_t tag) noexcept {
    if (num_other_tags < kTagsKept) other_tags[num_other_tags++] = tag;
  }
};

// What the ranks of a group share memory for.
enum class Purpose : std::uint32_t {
  moving = 0,   // to move the bytes of their calls
  posting = 1,  // to find out whether their calls agree
};

// Choices that all ranks must make alike, made once by the creator.
struct Tuning {
  std::uint64_t slot_bytes;           // capacity of a staging slot
  std::uint64_t chunk_bytes;          // bytes of a slot that a tick of a long call uses
  std::uint64_t one_shot_bytes;       // an all_reduce up to this size takes one tick in which every rank reduces all
  std::uint64_t message_chunk_bytes;  // capacity of a chunk of a channel
  Check check;
  Purpose purpose;
  std::uint32_t crowded;  // more ranks than CPUs: a waiter lends its CPU instead of spinning
  std::uint32_t spin_us;  // how long a waiter spins or lends before it sleeps
};

struct Header {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t size;
  std::uint8_t nonce[16];
  std::uint64_t total_bytes;
  std::uint32_t reserved;  // 1: space has to be reserved before it is touched
  Tuning tuning;

  alignas(kLine) std::atomic<std::uint32_t> bell;  // futex word; changes when a sleeper's condition may have come true
  std::atomic<std::uint32_t> sleepers;

  alignas(kLine) std::atomic<std::uint32_t> report_state;  // ReportState; 0: no failure
  std::atomic<std::uint32_t> aborted;                      // 1: nobody waits any more, whatever the failure was
  std::atomic<std::uint32_t> shapes_noted;                 // 1: somebody warns that shapes differ
  std::atomic<std::uint32_t> refused;                      // 1: a rank has refused a call
  Failure failures[kReports];
};

struct alignas(kLine) Control {
  // Ring by seq: low 16 bits the seq, then 16 bits the shape's hash, then the running hash of all signatures up to it.
  std::atomic<std::uint64_t> words[kRing];
  std::atomic<std::uint64_t> counters[3];  // by Counter
  // The last of the words once more: beside the counters, where those who wait for this rank look anyhow.
  std::atomic<std::uint64_t> latest;
  std::atomic<std::uint32_t> left;     // Leaving; not 0: this rank makes no further step
  std::atomic<std::uint32_t> gave_up;  // bits of GaveUp: where this rank takes no further step in the broken group
  std::atomic<std::uint32_t> claimed;  // 1: a process is this rank
  std::atomic<std::uint32_t> cpu;      // where this rank last published, plus 1; a hint
};

// In place of a seat: all seats but that of the rank itself.
inline constexpr Seat kEverySeat{-1};

// What a sleeping rank waits for, so that only the publisher that completes it rings the bell.
struct alignas(kLine) WaitLine {
  std::atomic<std::uint32_t> counter;  // 0: not asleep; else Counter + 1
  std::atomic<Seat> seat;              // whose counter; kEverySeat: that of all others
  std::atomic<std::uint64_t> value;
};

// Where a rank sleeps until something happens to one of its messages.
struct alignas(kLine) MessageLine {
  std::atomic<std::uint32_t> bell;  // futex word
  std::atomic<std::uint32_t> sleeps;
};

// What a rank has to say of its end: the first exception that nobody caught, with its traceback.
struct alignas(kLine) LastWords {
  std::atomic<std::uint32_t> said;
  std::atomic<std::int32_t> exit_status;  // 0: not known yet; else 1 + what waitpid will give
  char text[4088];
};

// Where a rank's main thread is, told by another of its threads to whoever asks.
struct alignas(kLine) Answer {
  std::atomic<std::uint32_t> asked;      // futex word; the number of the last question
  std::atomic<std::uint32_t> answered;   // futex word; the number of the last question that the text answers
  std::atomic<std::uint64_t> completed;  // the seq of the last call that ended well; not where peers look all the time
  SharedText<31> box;                    // the path of the rank's black box
  SharedText<477> text;
};

// A call that a rank has refused because its own arguments were wrong. transports/refusals.py makes and reads the text.
struct alignas(kLine) RefusalLine {
  std::atomic<std::uint32_t> open;  // 1: the rank has not made the call since
  SharedText<126> text;
};

// Where in the program calls were made, by the number of the place modulo kLocations.
struct alignas(kLine) LocationLine {
  std::atomic<std::uint32_t> id;
  SharedText<14> text;
};

// A call, described for peers: to explain a mismatch, and for what each rank may choose for itself (the factor).
struct alignas(kLine) Descriptor {
  std::uint64_t seq;
  std::uint64_t result;  // at Check::full, a hash of what the call before gave
  std::uint32_t location;
  Description call;
};

// A call that a rank has made, as reports tell of it.
struct MadeCall {
  std::uint64_t seq = 0;     // 0: there is none
  std::uint64_t result = 0;  // as in Descriptor
  Description description;
  char where[kWhereBytes] = {};
};

// What the finder of a mismatch saw of a rank.
struct alignas(kLine) Testimony {
  MadeCall call;       // none: the rank had not made it
  MadeCall completed;  // the last one that ended well there
  // Where the group only posts: the last call that the rank had posted. A call up to that, and not here, was made, but
  // too many have been made since.
  std::uint64_t posted = 0;
  char refused[1008];  // the text of the last call of the kind that the rank had refused
};

// Messages from one rank to another (messages.hpp). All counters only grow.
struct ChannelLines {
  struct alignas(kLine) {
    std::atomic<std::uint64_t> announced;  // envelopes posted
    std::atomic<std::uint64_t> staged;     // chunks filled
  } sender;
  struct alignas(kLine) {
    std::atomic<std::uint64_t> taken;    // envelopes read
    std::atomic<std::uint64_t> granted;  // messages asked for
    std::atomic<std::uint64_t> freed;    // chunks read
    std::uint64_t grants[kGrants];       // the numbers of the messages asked for, a ring
  } receiver;
};

// What a rank has posted of its collectives (posting.hpp).
struct PostLine {
  alignas(kLine) std::atomic<std::uint64_t> posted;
  alignas(kLine) std::atomic<std::uint64_t> words[kPostLevels][kPostDepth];
};

// A call that a rank has posted, in full. Others may read it while it is replaced: then they get nothing.
struct alignas(kLine) PostEntry {
  struct Content {
    std::uint64_t seq;
    std::uint64_t result;  // as in Descriptor
    Description call;
    std::uint32_t location;
    std::uint64_t balance;  // as in DividedCall
  };
  static constexpr std::size_t kWords = (sizeof(Content) + 7) / 8;

  std::atomic<std::uint64_t> number;  // of the content, counted from 1; 0: none, or it is being replaced
  std::atomic<std::uint64_t> words[kWords];
};

// What a rank has posted of its messages to or from one peer.
struct alignas(kLine) PairLine {
  std::atomic<std::uint64_t> posted;
  std::atomic<std::uint64_t> words[kPairLevels][1 << kPairDepthBits];
};

struct alignas(64) Envelope {
  std::uint64_t bytes;
  std::int64_t count;
  std::uint32_t tag;
  std::uint32_t unlisted_dtype;  // as in Description
  std::uint32_t location;
  std::uint8_t flags;  // CallFlags
  std::uint8_t dtype;
  alignas(64) std::byte body[kInlineBytes];
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(Header) <= kHeaderBytes);
static_assert(sizeof(Control) == kLine);
static_assert(sizeof(WaitLine) == kLine);
static_assert(sizeof(Descriptor) == kLine);
static_assert(sizeof(LastWords) == kPage);
static_assert(sizeof(Answer) == kPage);
static_assert(sizeof(RefusalLine) == 8 * kLine);
static_assert(sizeof(LocationLine) == kLine);
static_assert(sizeof(ChannelLines) == 2 * kLine);
static_assert(sizeof(Envelope) == kEnvelopeBytes);
static_assert(sizeof(PostEntry) == kLine);
static_assert(sizeof(PairLine) == kLine);
static_assert(std::is_trivially_destructible_v<Header>);

// The smallest slot that has room for a piece of its own for every rank.
constexpr std::size_t smallest_slot(int size) {
  return static_cast<std::size_t>(size) * 64 > kPage ? static_cast<std::size_t>(size) * 64 : kPage;
}

constexpr std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// Byte offsets of the areas for a given number of ranks.
struct Offsets {
  std::size_t ranks, control, wait, message, words, answers, refusals, testimonies, locations, descriptors, sizes,
      sizes_stride, lines, staging, staging_stride, bodies, body_stride, posts, entries, pairs, total;

  constexpr Offsets(int size, const Tuning& tuning) : Offsets(static_cast<std::size_t>(size), tuning) {}

 private:
  constexpr Offsets(std::size_t size, const Tuning& tuning)
      : ranks(kHeaderBytes),
        control(ranks + round_up(size * sizeof(std::int32_t), kLine)),
        wait(control + size * sizeof(Control)),
        message(wait + size * sizeof(WaitLine)),
        words(message + size * sizeof(MessageLine)),
        answers(words + size * sizeof(LastWords)),
        refusals(answers + size * sizeof(Answer)),
        testimonies(refusals + size * kLaneKinds * sizeof(RefusalLine)),
        locations(testimonies + kReports * size * sizeof(Testimony)),
        descriptors(locations + size * kLocations * sizeof(LocationLine)),
        sizes(descriptors + size * kRing * sizeof(Descriptor)),
        sizes_stride(round_up((2 * size + 2) * sizeof(std::uint64_t), kLine)),
        lines(sizes + size * kRing * sizes_stride),
        staging(round_up(lines + size * size * sizeof(ChannelLines), kPage)),
        staging_stride(round_up(tuning.slot_bytes * kSlots, kPage)),
        bodies(staging + size * staging_stride),
        body_stride(round_up(kEnvelopes * sizeof(Envelope) + kChunks * tuning.message_chunk_bytes, kPage)),
        posts(descriptors),
        entries(posts + size * sizeof(PostLine)),
        pairs(entries + size * kLaneKinds * kPostDepth * sizeof(PostEntry)),
        total(tuning.purpose == Purpose::moving ? bodies + size * size * body_stride
                                                : round_up(pairs + size * 2 * size * sizeof(PairLine), kPage)) {}
};

}  // namespace phalanx
