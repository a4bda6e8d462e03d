#pragma once

#include <Python.h>
#include <unistd.h>

namespace eagercache {

// Lets go of the interpreter lock for a block, as pybind11's gil_scoped_release does. A thread that
// comes back while the interpreter is being torn down stays here for ever: Python would end it by
// unwinding, which aborts the process in the first function that may not throw.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() noexcept(
      false) {  // Python may still begin to end between the question and the lock
    while (is_finalizing()) {
      pause();
    }
    PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  static bool is_finalizing() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
  }

  PyThreadState* const state_;
};

}  // namespace eagercache
