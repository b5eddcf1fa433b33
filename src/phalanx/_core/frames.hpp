// Python's frames, from the innermost one outwards.
#pragma once

#include <Python.h>

namespace phalanx {

struct Frame {
  PyCodeObject* code;  // borrowed
  int instruction;     // the offset in bytes, as PyCode_Addr2Line takes it
};

// With the GIL held. Calls visit(frame, context) until it returns true.
void walk_frames(bool (*visit)(const Frame& frame, void* context), void* context);

}  // namespace phalanx
