// The forms of collectives: which tensors a form takes, which of them are right, and how the call is described.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "front_checks.hpp"

namespace phalanx {

enum class Form : std::uint8_t {
  barrier,
  all_reduce,
  all_reduce_coalesced,
  reduce,
  broadcast,
  broadcast_coalesced,
  all_gather,
  all_gather_single,
  all_gather_coalesced,
  all_gather_single_coalesced,
  gather,
  scatter,
  reduce_scatter,
  reduce_scatter_single,
  reduce_scatter_single_coalesced,
  all_to_all,
  all_to_all_single,
};

constexpr Op op_of(Form form) noexcept {
  switch (form) {
    case Form::barrier:
      return Op::barrier;
    case Form::all_reduce:
    case Form::all_reduce_coalesced:
      return Op::all_reduce;
    case Form::reduce:
      return Op::reduce;
    case Form::broadcast:
    case Form::broadcast_coalesced:
      return Op::broadcast;
    case Form::all_gather:
    case Form::all_gather_single:
    case Form::all_gather_coalesced:
    case Form::all_gather_single_coalesced:
      return Op::all_gather;
    case Form::gather:
      return Op::gather;
    case Form::scatter:
      return Op::scatter;
    case Form::reduce_scatter:
    case Form::reduce_scatter_single:
    case Form::reduce_scatter_single_coalesced:
      return Op::reduce_scatter;
    case Form::all_to_all:
    case Form::all_to_all_single:
      break;
  }
  return Op::all_to_all;
}

// What a collective is given, but for the group. A form leaves out what it does not have.
struct Arguments {
  nanobind::handle output;  // a tensor or list that is written; of an op in place, also what is read
  nanobind::handle input;   // a tensor or list that is read
  int reduce_op = kNoReduceOp;
  double factor = 1.0;
  std::int64_t root = kNoRank;
  std::vector<std::int64_t> output_splits;  // empty: equal parts
  std::vector<std::int64_t> input_splits;
};

// How tensors are divided into blocks.
enum class Cut : std::uint8_t {
  nothing,  // there are no tensors
  whole,    // one block, of all tensors one after another
  evenly,   // every tensor into one part per rank; block b is part b of each
  listed,   // the tensors are the blocks, the same number for each rank
  sized,    // the one tensor into parts of `sizes` elements
};

struct Side {
  std::vector<TensorView> tensors;
  Cut cut = Cut::nothing;
  std::vector<std::int64_t> sizes;

  void fill(Blocks& blocks, int num_ranks) const;
  void clear() noexcept {
    tensors.clear();
    cut = Cut::nothing;
    sizes.clear();
  }
};

// A call whose arguments are right. An op in place has its tensors in `in` alone.
struct Arranged {
  Description call;
  Side in;
  Side out;
  bool writes_input = false;

  void clear() noexcept {
    call = Description();
    in.clear();
    out.clear();
    writes_input = false;
  }
};

// With the GIL held. Throws Problem; UnknownTensor as the reader does. `made` is empty, and may have been used before.
void arrange(Form form, const Arguments& arguments, int rank, int size, TensorReader& reader, Arranged& made);

void bind_forms(nanobind::module_& module);

}  // namespace phalanx
