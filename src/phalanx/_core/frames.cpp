#include "frames.hpp"

// The public way makes an object of every frame on the way, which takes longer than sending a short message does.
#if PY_VERSION_HEX < 0x030c0000
#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#else
#include <frameobject.h>
#endif

namespace phalanx {

#if PY_VERSION_HEX < 0x030c0000

void walk_frames(bool (*visit)(const Frame& frame, void* context), void* context) {
  const _PyInterpreterFrame* frame = PyThreadState_Get()->cframe->current_frame;
  for (; frame != nullptr; frame = frame->previous) {
    const auto* first = reinterpret_cast<const _Py_CODEUNIT*>(frame->f_code->co_code_adaptive);
    const auto instruction = static_cast<int>(frame->prev_instr - first) * static_cast<int>(sizeof(_Py_CODEUNIT));
    // Negative in a frame that has only been made.
    if (instruction >= 0 && visit({frame->f_code, instruction}, context)) return;
  }
}

#else

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

#endif

}  // namespace phalanx
