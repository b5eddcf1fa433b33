// The table of ops: one row per op. Native code, transports, records, causes and traces read it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace phalanx {

// The numbers are part of the signature and of the records in black boxes: a new op gets the next one.
enum class Op : std::uint8_t {
  barrier = 0,
  all_reduce = 1,
  reduce = 2,
  broadcast = 3,
  all_gather = 4,
  gather = 5,
  scatter = 6,
  reduce_scatter = 7,
  all_to_all = 8,
  // Not collectives: they have no seq in common and never come as a Request.
  send = 9,
  recv = 10,
  // Steps in which the ranks of a group make another group: they exchange texts.
  split_group = 11,
  merge_remote_group = 12,
};

// Whom a rank waits for in a call.
enum class Peers : std::uint8_t { none, root, all, peer };

struct OpTraits {
  std::string_view name;  // torch's public spelling
  bool is_message;        // has one sender and one receiver, and no seq that all ranks share
  bool rooted;            // has a root, which all ranks name
  bool reduces;           // has a reduce op
  bool in_place;          // reads and writes the same tensors
  bool shared_result;     // all ranks get the same bytes
  bool exchanges_sizes;   // ranks may pass any sizes, which they compare in pairs
  bool shape_of_outputs;  // a call's shape is that of its outputs
  Peers others_wait_for;  // whom a rank waits for; of a rooted op, a rank that is not the root
  Peers root_waits_for;   // whom the root waits for; the same where there is none
};

inline constexpr std::array kOps{
    // name, message, rooted, reduces, in place, shared result, exchanges sizes, shape of outputs, others wait, root
    // waits
    OpTraits{"barrier", false, false, false, false, false, false, false, Peers::all, Peers::all},
    OpTraits{"all_reduce", false, false, true, true, true, false, false, Peers::all, Peers::all},
    OpTraits{"reduce", false, true, true, true, false, false, false, Peers::none, Peers::all},
    OpTraits{"broadcast", false, true, false, false, true, false, false, Peers::root, Peers::none},
    OpTraits{"all_gather", false, false, false, false, true, false, false, Peers::all, Peers::all},
    OpTraits{"gather", false, true, false, false, false, false, false, Peers::none, Peers::all},
    OpTraits{"scatter", false, true, false, false, false, false, true, Peers::root, Peers::none},
    OpTraits{"reduce_scatter", false, false, true, false, false, false, true, Peers::all, Peers::all},
    OpTraits{"all_to_all", false, false, false, false, false, true, false, Peers::all, Peers::all},
    OpTraits{"send", true, false, false, false, false, false, false, Peers::peer, Peers::peer},
    OpTraits{"recv", true, false, false, false, false, false, false, Peers::peer, Peers::peer},
    OpTraits{"split_group", false, false, false, false, true, false, false, Peers::all, Peers::all},
    OpTraits{"merge_remote_group", false, false, false, false, true, false, false, Peers::all, Peers::all},
};
inline constexpr int kNumOps = static_cast<int>(kOps.size());
static_assert(kOps[static_cast<std::size_t>(Op::merge_remote_group)].name == "merge_remote_group");

constexpr const OpTraits& traits_of(Op op) noexcept { return kOps[static_cast<std::size_t>(op)]; }

constexpr bool is_message(Op op) noexcept { return traits_of(op).is_message; }

}  // namespace phalanx
