// What a call is. A call is described once, when it is made. Its signature, its descriptor in the segment, its record
// in the black box, traces and reports read this description by the names of its fields.
#pragma once

#include <cstdint>

#include "dtypes.hpp"
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

// Who moves the bytes of a call.
enum class Engine : std::uint8_t { none = 0, shm = 1, threads = 2, gloo = 3, nccl = 4, other = 255 };

// Sizes of the tensor that the count is about, or of the tensors of a list.
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
  // Of a message.
  std::int32_t peer = kNoRank;
  std::uint32_t tag = 0;
  // What each rank may choose for itself.
  double factor = 1.0;
  std::uint8_t flags = 0;  // CallFlags
  Engine engine = Engine::none;
};

// Whether two ranks make the same call, whatever the shapes of their tensors are.
constexpr bool agrees(const Description& one, const Description& other) noexcept {
  return one.op == other.op && one.reduce_op == other.reduce_op && one.dtype == other.dtype &&
         one.unlisted_dtype == other.unlisted_dtype && one.root == other.root && one.count == other.count &&
         one.layout == other.layout;
}

}  // namespace phalanx
