// What a call is. A call is described once, when it is made. Its signature, its descriptor in the segment, its record
// in the black box, traces and reports read this description by the names of its fields.
//
// Records in files have all of it. So a new field takes spare bytes, and the others stay where they are; it gets a row
// in the table below, and 0 must mean that it is not known.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "dtypes.hpp"
#include "fields.hpp"
#include "ops.hpp"

namespace phalanx {

inline constexpr std::int8_t kNoReduceOp = -1;
inline constexpr std::int32_t kNoRank = -1;
// The peer of a receive from whoever comes first.
inline constexpr std::int32_t kAnySource = -1;
// The count of a call in which ranks may pass different numbers of elements.
inline constexpr std::int64_t kAnyCount = -1;
// Sizes of a tensor or list that a description keeps.
inline constexpr int kSizesKept = 8;

// How a call came.
enum CallFlags : std::uint8_t {
  kAsync = 1,
  kInBackward = 2,
  kByReducer = 4,  // from C++ in the midst of a backward pass: DDP's reducer
};

// The type of the device on which the tensors of a call lie.
enum class Device : std::uint8_t { none = 0, cpu = 1, cuda = 2, xpu = 3, other = 255 };
// By number, as torch spells them; none: not known, or no tensors.
inline constexpr std::array<std::string_view, 4> kDeviceNames{"", "cpu", "cuda", "xpu"};

// Who moves the bytes of a call.
enum class Engine : std::uint8_t { none = 0, shm = 1, threads = 2, gloo = 3, nccl = 4, other = 255 };
inline constexpr std::array<std::string_view, 5> kEngineNames{"", "shm", "threads", "gloo", "nccl"};

// Sizes of a tensor of the call, which one being the op's choice, or of the tensors of a list.
struct Shape {
  std::uint8_t num = 0;  // saturates; the first kSizesKept are kept
  bool listed = false;
  std::uint16_t hash = 0;  // of all of them; 0 where ranks may differ
  std::uint32_t sizes[kSizesKept] = {};
  bool operator==(const Shape&) const = default;
};

struct Description {
  // What must agree on all ranks.
  Op op = Op::barrier;
  std::int8_t reduce_op = kNoReduceOp;
  DType dtype = DType::none;
  Device device = Device::none;
  std::int32_t root = kNoRank;
  std::int64_t count = 0;            // kAnyCount where ranks may differ
  std::uint32_t layout = 0;          // a hash of how the elements are divided between tensors; 0 in the plain cases
  std::uint32_t unlisted_dtype = 0;  // a hash of the dtype's name, where the dtype is DType::other
  Shape shape;                       // must agree at Check::full
  // Of a message; a receive from any rank has kAnySource.
  std::int32_t peer = kNoRank;
  // What each rank may choose for itself.
  double factor = 1.0;
  std::uint32_t tag = 0;   // of a message
  std::uint8_t flags = 0;  // CallFlags
  Engine engine = Engine::none;
  Spare<2> spare;
};

inline constexpr std::array kDescriptionFields{
    PHALANX_FIELD(Description, op),         PHALANX_FIELD(Description, reduce_op),
    PHALANX_FIELD(Description, dtype),      PHALANX_FIELD(Description, device),
    PHALANX_FIELD(Description, root),       PHALANX_FIELD(Description, count),
    PHALANX_FIELD(Description, layout),     PHALANX_FIELD(Description, unlisted_dtype),
    PHALANX_FIELD(Description, shape.num),  PHALANX_FIELD(Description, shape.listed),
    PHALANX_FIELD(Description, shape.hash), PHALANX_FIELD(Description, shape.sizes),
    PHALANX_FIELD(Description, peer),       PHALANX_FIELD(Description, factor),
    PHALANX_FIELD(Description, tag),        PHALANX_FIELD(Description, flags),
    PHALANX_FIELD(Description, engine),     PHALANX_FIELD(Description, spare),
};
static_assert(covers(kDescriptionFields, sizeof(Description)));

// Whether two ranks make the same call, whatever the shapes of their tensors are. Where only Phalanx moves bytes, all
// tensors are on the CPU.
constexpr bool agrees(const Description& one, const Description& other) noexcept {
  return one.op == other.op && one.reduce_op == other.reduce_op && one.dtype == other.dtype &&
         one.unlisted_dtype == other.unlisted_dtype && one.root == other.root && one.count == other.count &&
         one.layout == other.layout && one.device == other.device;
}

// What a message carries.
struct MessageContent {
  DType dtype = DType::none;
  std::uint32_t unlisted_dtype = 0;
  std::int64_t count = 0;
  bool operator==(const MessageContent&) const = default;
};
constexpr MessageContent content_of(const Description& message) noexcept {
  return {message.dtype, message.unlisted_dtype, message.count};
}

}  // namespace phalanx
