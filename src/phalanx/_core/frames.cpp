#include "frames.hpp"

#include <frameobject.h>

namespace phalanx {

void walk_frames(bool (*visit)(const Frame& frame, void* context), void* context) {
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const bool is_last = visit({code, PyFrame_GetLasti(frame)}, context);
    Py_DECREF(code);
    PyFrameObject* back = is_last ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
}

}  // namespace phalanx
