// Reads torch's options of a call: reduce op, root, timeout, whether the call is asynchronous.
//
// The options are objects that pybind11 made. To read their attributes makes Python objects, which takes a third of a
// small call's time. So `learn` finds out at which offset of the C++ object each field lies: it is given objects whose
// fields are known, reads their memory through the system, which can't crash, and takes the only offset at which all of
// them agree. A field that is not found this way is read as an attribute.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace phalanx {

struct CallOptions {
  std::int64_t timeout_ms;  // -1: none was given
  std::int64_t root;        // of ops that have one
  std::int64_t root_tensor;
  int reduce_op;
  bool is_async;
};

// What an op reads of its options.
struct OptionsWanted {
  bool reduce_op = false;
  bool root = false;
  bool root_tensor = false;
};

// False: not torch's options, or not those of such an op. With the GIL held.
bool read_options(PyObject* options, const OptionsWanted& wanted, CallOptions& found);
// The number of a ReduceOp or RedOpType; -1 where it is none.
int reduce_op_of(PyObject* op);

void bind_options(nanobind::module_& module);

}  // namespace phalanx
