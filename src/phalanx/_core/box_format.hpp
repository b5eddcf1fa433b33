// What lies where in a black box, version 3:
//
//   BoxHeader (a page) | arena | BoxRecord[capacity]
//
// The arena only grows. It has texts, each ended by a zero byte, and BoxGroups, which have a zero byte at their end.
// Others refer to these by offsets into the arena; 0 is an empty text, or one that found no room. The text of a place
// in the program is its file, line and function, divided by kDivider.
//
// Python reads a box by the tables below, and keeps the tables of earlier versions (debug/box_layout.py). A field that
// takes spare bytes, where 0 means that it is not known, needs no new version; any other change does.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "description.hpp"
#include "fields.hpp"
#include "layout.hpp"

namespace phalanx {

inline constexpr char kBoxMagic[] = "PHXBOX01";
inline constexpr std::uint32_t kBoxVersion = 3;
inline constexpr char kDivider = '\x1f';
// Peers that a box remembers to have died: what comes later is not the cause.
inline constexpr std::uint32_t kMostDeaths = 16;
// In a record's id while the record is marked.
inline constexpr std::uint64_t kMarking = std::uint64_t{1} << 63;

// What a record is about.
enum class RecordKind : std::uint8_t {
  call = 0,
  making = 1,  // of a group: its seq is the number of the meeting
};

enum class CallState : std::uint8_t { scheduled = 1, started = 2, completed = 3, failed = 4 };

// How a process ended, by the folder of its job (debug/folders.py).
enum class BoxEnding : std::uint32_t { running = 0, well = 1, failed = 2 };

// What a process knows of its own end.
enum class Ending : std::uint32_t {
  unknown = 0,
  exit = 1,         // it left its groups in order
  exception = 2,    // nobody caught it
  consequence = 3,  // the same, of an exception that came of a group's failure
};

// A peer that was seen to have died.
struct BoxDeath {
  std::atomic<std::int64_t> seen;  // when; 0: no death yet. Written last
  std::int64_t pid;
  std::uint64_t start;
  std::int32_t status;     // as waitpid gives it; kUnknownStatus
  std::uint16_t replaced;  // 1: the process lives on, and has called exec
  std::uint16_t rank;      // 1 + its rank in the job; 0: unknown
};

inline constexpr std::array kBoxDeathFields{
    PHALANX_FIELD(BoxDeath, seen),   PHALANX_FIELD(BoxDeath, pid),      PHALANX_FIELD(BoxDeath, start),
    PHALANX_FIELD(BoxDeath, status), PHALANX_FIELD(BoxDeath, replaced), PHALANX_FIELD(BoxDeath, rank),
};
static_assert(covers(kBoxDeathFields, sizeof(BoxDeath)));

struct BoxHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t capacity;
  std::uint32_t arena_bytes;
  std::uint32_t record_bytes;
  std::int64_t pid;
  std::uint64_t start;
  std::int64_t clock_offset;  // what makes a time of day of a record's times, in nanoseconds
  std::atomic<std::int32_t> rank;
  std::atomic<std::int32_t> world_size;
  std::atomic<std::uint64_t> next;  // records begun so far
  std::atomic<std::uint32_t> arena_used;
  std::atomic<BoxEnding> ending;
  char program[256];
  std::atomic<std::int64_t> ended;  // when the process began to end; 0: it has not
  std::atomic<Ending> how;
  std::atomic<std::int32_t> exit_status;  // 1 + what waitpid will give; 0: unknown
  std::atomic<std::int64_t> num_hidden;   // calls in flight whose records were overwritten
  std::atomic<std::uint32_t> num_deaths;  // of those below
  Spare<4> spare;
  BoxDeath deaths[kMostDeaths];
  char exception[1024];
  char host[64];  // the name of the process' host
};

inline constexpr std::array kBoxHeaderFields{
    PHALANX_FIELD(BoxHeader, magic),       PHALANX_FIELD(BoxHeader, version),      PHALANX_FIELD(BoxHeader, capacity),
    PHALANX_FIELD(BoxHeader, arena_bytes), PHALANX_FIELD(BoxHeader, record_bytes), PHALANX_FIELD(BoxHeader, pid),
    PHALANX_FIELD(BoxHeader, start),       PHALANX_FIELD(BoxHeader, clock_offset), PHALANX_FIELD(BoxHeader, rank),
    PHALANX_FIELD(BoxHeader, world_size),  PHALANX_FIELD(BoxHeader, next),         PHALANX_FIELD(BoxHeader, arena_used),
    PHALANX_FIELD(BoxHeader, ending),      PHALANX_FIELD(BoxHeader, program),      PHALANX_FIELD(BoxHeader, ended),
    PHALANX_FIELD(BoxHeader, how),         PHALANX_FIELD(BoxHeader, exit_status),  PHALANX_FIELD(BoxHeader, num_hidden),
    PHALANX_FIELD(BoxHeader, num_deaths),  PHALANX_FIELD(BoxHeader, spare),        PHALANX_FIELD(BoxHeader, deaths),
    PHALANX_FIELD(BoxHeader, exception),   PHALANX_FIELD(BoxHeader, host),
};
static_assert(covers(kBoxHeaderFields, sizeof(BoxHeader)));
static_assert(sizeof(BoxHeader) <= kPage);

// A group as one of its ranks knows it, in the arena.
struct BoxGroup {
  std::uint32_t name;
  std::uint32_t description;
  std::uint32_t identity;  // equal on all ranks of the group, and on those of no other; 0: it is being made
  std::uint32_t venue;     // where the ranks of a group that is being made meet
  std::uint32_t ranks;     // those of the job, in the order of the group's own, "0-2,5"; 0: those of the world
  std::int32_t rank;       // this rank in the group
  Spare<8> spare;
};

inline constexpr std::array kBoxGroupFields{
    PHALANX_FIELD(BoxGroup, name),  PHALANX_FIELD(BoxGroup, description), PHALANX_FIELD(BoxGroup, identity),
    PHALANX_FIELD(BoxGroup, venue), PHALANX_FIELD(BoxGroup, ranks),       PHALANX_FIELD(BoxGroup, rank),
    PHALANX_FIELD(BoxGroup, spare),
};
static_assert(covers(kBoxGroupFields, sizeof(BoxGroup)));

// Three cache lines. The marks of a call in flight go to the first one, but for those of a failure.
struct alignas(64) BoxRecord {
  std::atomic<std::uint64_t> id;  // from 1; 0 while the record is being written; with kMarking while it is marked
  std::atomic<CallState> state;
  RecordKind kind;
  std::uint8_t failure;  // FailureKind of the group, where the call has failed
  Spare<1> spare;
  std::uint32_t group;
  std::atomic<std::uint64_t> seq;
  std::int64_t created;
  std::atomic<std::int64_t> started;
  std::atomic<std::int64_t> ended;
  // Ranks of the group; kNoRank: none, or unknown.
  std::int32_t sender;        // of what a receive from any rank got, as soon as it is known
  std::int32_t last_arriver;  // the peer that came last, where this rank waited for one peer alone, or saw all come
  std::int32_t blamed;        // the rank that left, died or aborted, where the call has failed
  std::uint32_t location;
  std::uint64_t bytes_in;
  std::uint64_t bytes_out;
  std::uint32_t timeout_ms;
  Spare<4> more_spare;
  Description call;
  Spare<24> last_spare;
};

inline constexpr auto kBoxRecordFields = joined(
    std::array{
        PHALANX_FIELD(BoxRecord, id),
        PHALANX_FIELD(BoxRecord, state),
        PHALANX_FIELD(BoxRecord, kind),
        PHALANX_FIELD(BoxRecord, failure),
        PHALANX_FIELD(BoxRecord, spare),
        PHALANX_FIELD(BoxRecord, group),
        PHALANX_FIELD(BoxRecord, seq),
        PHALANX_FIELD(BoxRecord, created),
        PHALANX_FIELD(BoxRecord, started),
        PHALANX_FIELD(BoxRecord, ended),
        PHALANX_FIELD(BoxRecord, sender),
        PHALANX_FIELD(BoxRecord, last_arriver),
        PHALANX_FIELD(BoxRecord, blamed),
        PHALANX_FIELD(BoxRecord, location),
        PHALANX_FIELD(BoxRecord, bytes_in),
        PHALANX_FIELD(BoxRecord, bytes_out),
        PHALANX_FIELD(BoxRecord, timeout_ms),
        PHALANX_FIELD(BoxRecord, more_spare),
    },
    moved(kDescriptionFields, offsetof(BoxRecord, call)), std::array{PHALANX_FIELD(BoxRecord, last_spare)});
static_assert(covers(kBoxRecordFields, sizeof(BoxRecord)));
static_assert(sizeof(BoxRecord) == 192);

}  // namespace phalanx
