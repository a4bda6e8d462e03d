#include "python_hooks/bindings/python_miss_handler.h"

#include <stdexcept>
#include <string>

#include "python_hooks/bindings/without_gil.h"
#include "python_hooks/nn_modules/raise_later.h"

namespace eagercache {

namespace py = pybind11;

namespace {

// Runs the handlers of signals that have come, which Python does on the main thread alone; whether
// one of them raised.
bool is_interrupted() {
  if (!is_first_thread() || Py_IsInitialized() == 0) {
    return false;
  }
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) {
    return false;
  }
  raise_later();
  return true;
}

}  // namespace

PythonMissHandler::PythonMissHandler(py::function submit, py::object put_aside)
    : submit_(submit.release().ptr()), put_aside_(put_aside.release().ptr()) {}

void PythonMissHandler::submit(const CompileRequest& request) {
  if (Py_IsInitialized() == 0) {
    throw std::runtime_error("the interpreter has gone");
  }
  std::string error;
  {
    py::gil_scoped_acquire gil;
    try {
      py::reinterpret_borrow<py::function>(submit_)(py::str(request.call_json));
    } catch (py::error_already_set& raised) {
      error = raised.what();
    }
  }
  if (!error.empty()) {
    throw std::runtime_error(error);
  }
}

void PythonMissHandler::note_put_aside(const std::string& digest,
                                       const std::string& reason) noexcept {
  if (put_aside_ == Py_None || Py_IsInitialized() == 0) {
    return;
  }
  const py::gil_scoped_acquire gil;
  try {
    py::reinterpret_borrow<py::function>(put_aside_)(digest, reason);
  } catch (py::error_already_set& raised) {
    raised.discard_as_unraisable("eagercache");
  } catch (...) {
    // Out of memory.
  }
}

void PythonMissHandler::run_blocking(const std::function<bool()>& wait) {
  const bool locked = PyGILState_Check() != 0;
  const auto wait_unlocked = [&] {
    const WithoutGil no_gil;
    return wait();
  };
  while (!(locked ? wait_unlocked() : wait())) {
    if (is_interrupted()) {
      return;
    }
  }
}

}  // namespace eagercache
