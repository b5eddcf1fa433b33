// What may be wrong with the arguments of a call. One set of checks for all transports: a check throws a Problem, which
// has the facts, and Python writes the text (collectives/problems.py).
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "front_tensors.hpp"

namespace phalanx {

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

using Views = std::vector<TensorView>;

// The name of an entry of a list.
std::string entry_of(const std::string& list, std::size_t index);

// Where the tensor is written, no two of its elements share memory. `index` is the place in a list, or -1.
TensorView read_one(TensorReader& reader, nanobind::handle tensor, const char* name, Py_ssize_t index, bool written);
// Adds those of a list of `num` tensors, or, where that is negative, of at least one.
void read_several(TensorReader& reader, Views& tensors, nanobind::handle list, const char* name, bool written,
                  std::int64_t num);
// A rank that is not the root gives none, or an empty list.
void check_no_list(nanobind::handle list, const char* name);

// One list of tensors per rank.
void check_lists(nanobind::handle lists, const char* name, int size);
void check_root(std::int64_t root, int size);
// The dtype has the reduce op, and the factor of PREMUL_SUM fits.
void check_reduction(const TensorView& tensor, int reduce_op, double factor);
// No two tensors, which are written, share memory. `per_rank` of them belong to each rank, where that is not 0: they
// are named by two indices.
void check_apart(const TensorReader& reader, const Views& tensors, const char* name, std::size_t per_rank = 0);
void check_dtype(const TensorView& tensor, const TensorView& like, const std::string& name);
void check_dtypes(const Views& tensors, const TensorView& like, const char* name);
void check_size(const TensorView& tensor, std::int64_t expected, const std::string& name, std::string other);
void check_product(const TensorView& tensor, const TensorView& part, int size, const std::string& name);
// A rank's block for itself.
void check_own(std::int64_t sent, std::int64_t received);
void check_same_length(std::size_t actual, std::size_t expected, const std::string& name, const char* other);
// Rows of a tensor that are divided by splits, one per rank.
void check_splits(std::int64_t rows, const std::vector<std::int64_t>& splits, int size, const char* name,
                  const char* splits_name);

void bind_checks(nanobind::module_& module);

}  // namespace phalanx
