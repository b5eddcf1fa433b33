// The forms of collectives: which tensors a form takes, which of them are right, and how the call is described.
// One set of checks for all transports: a Problem has the facts, and Python writes the text (collectives/problems.py).
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "front_tensors.hpp"

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

enum class ProblemKind : std::uint8_t {
  not_a_list,     // `name` is `got`
  wrong_length,   // list `name` has `actual` entries, one per rank is `expected`
  empty_list,     // list `name`
  unlike_length,  // list `name` has `actual` entries, `other` has `expected`
  no_lists,       // outputs of several tensors are not `expected` lists, but `got`
  not_the_root,   // list `name` has `actual` entries on a rank that is not the root
  wrong_dtype,    // tensor `name` is `got`, and not of the dtype of `like`
  wrong_size,     // tensor `name` has `actual` elements, `other` has `expected`
  wrong_product,  // tensor `name` has `actual` elements, `expected` is those of another times the number of ranks
  wrong_own,      // a rank's block for itself has `actual` elements of input and `expected` of output
  wrong_rows,     // tensor `name` has `actual` rows, which the ranks can't share equally; `other` are its splits
  wrong_splits,   // there are `actual` splits `name`, one per rank is `expected`
  wrong_sum,      // splits `name` do not add up to the `expected` rows of `other`
  wrong_root,     // the root is not a rank of the group
  no_reduction,   // the dtype of `got` does not have the reduce op, or the factor does not fit
  overlaps,       // tensors `name` and `other` are written and share memory
  overlaps_self,  // elements of the tensor `name`, `got`, are written and share memory
};

// Thrown.
struct Problem {
  ProblemKind kind;
  std::string name;
  std::string other;
  std::int64_t expected = 0;
  std::int64_t actual = 0;
  nanobind::object got;
  nanobind::object like;
};

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
};

// A call whose arguments are right. An op in place has its tensors in `in` alone.
struct Arranged {
  Description call;
  Side in;
  Side out;
  bool writes_input = false;
};

// What Python decides about tensors that are not contiguous.
struct MemoryLook {
  nanobind::handle overlaps_itself;  // (tensor) -> bool
  nanobind::handle find_shared;      // (tensors) -> (int, int) or None
};

// With the GIL held. Throws Problem; UnknownTensor as the reader does.
Arranged arrange(Form form, const Arguments& arguments, int rank, int size, TensorReader& reader);

// A tensor that is right by itself. Where it is written, no two of its elements share memory. Throws like `arrange`.
TensorView check_one(TensorReader& reader, nanobind::handle tensor, const char* name, bool written);

// A list of `num` tensors, or, where that is negative, of at least one.
void check_list(TensorReader& reader, nanobind::handle list, const char* name, std::int64_t num);

void bind_forms(nanobind::module_& module);

}  // namespace phalanx
