#include "python_hooks/bindings/python_miss_handler.h"

#include <stdexcept>
#include <string>

#include "python_hooks/bindings/without_gil.h"

namespace eagercache {

namespace py = pybind11;

PythonMissHandler::PythonMissHandler(py::function submit) : submit_(submit.release().ptr()) {}

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

void PythonMissHandler::run_blocking(const std::function<void()>& wait) {
  if (PyGILState_Check() != 0) {
    const WithoutGil no_gil;
    wait();
  } else {
    wait();
  }
}

}  // namespace eagercache
