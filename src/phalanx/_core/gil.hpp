// Python's global interpreter lock: given up while the core works or waits, and taken back.
//
// A thread that wants the GIL while the interpreter ends does not get it. Python 3.14 and later let it hang; before,
// Python ends the thread by unwinding its stack, and std::terminate() ends the process where that meets a noexcept
// frame: a destructor, or nanobind's own. So all code of the core takes the GIL back through this file, and a thread
// that is to be unwound stays here until the process has ended. It holds no lock of the core meanwhile.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <exception>
#include <utility>

namespace phalanx {

[[noreturn]] inline void park_thread() noexcept {
  while (true) ::pause();
}

// Without the GIL for its lifetime.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      park_thread();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Runs Python code, which gives up the GIL and takes it back whenever it likes.
template <class Fn>
void call_python(Fn&& function) {
  try {
    std::forward<Fn>(function)();
  } catch (const std::exception&) {
    throw;
  } catch (...) {
    park_thread();
  }
}

}  // namespace phalanx
