// Plain calls in the spellings that torch uses: read, checked, described and handed over.
#pragma once

#include <nanobind/nanobind.h>

#include "front_calls.hpp"
#include "front_spelled.hpp"

namespace phalanx {

// A group's side of the front, for Python. Closed when the rank leaves the group.
struct Front {
  nanobind::object object;  // the native group
  GroupEnd* group = nullptr;
  double timeout = 0;       // of calls that have none of their own
  int copies = 0;           // calls in flight that write to copies of tensors
  bool coalescing = false;  // a coalescing manager collects the works of calls
};

// Python's side of the front. Set once; never destroyed.
struct Hooks {
  nanobind::object num_modes;  // () -> how many dispatch modes see calls of this thread
  nanobind::object profiler;   // the dict of torch.autograd.profiler
  nanobind::object done;       // the shared work of calls that have ended
  nanobind::object finished;   // (results) -> Work
  nanobind::object started;    // (group, native group, op, results, pending, written, timeout) -> Work
  nanobind::object messaged;   // (group, native group, op, tensor, pending, peer, timeout) -> Work
  nanobind::object explain;    // (group, native group, op, result, seq, timeout) -> an exception
};

Hooks& hooks();

// Carries out a call of a method of the group `self`. `num` arguments come by position, then those of `keywords`.
// Throws NotPlain, UnknownTensor or Problem where the call is not plain, and Python's exceptions.
nanobind::object carry_out_plain(const Method& method, PyObject* self, PyObject* const* args, Py_ssize_t num,
                                 PyObject* keywords);

}  // namespace phalanx
