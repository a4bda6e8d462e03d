#include "python_hooks/nn_modules/raise_later.h"

#include <Python.h>
#include <unistd.h>

#include <memory>
#include <new>

namespace eagercache {
namespace {

// An exception that waits until the interpreter asks for it. Owns references.
struct Raised {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
};

int raise_now(void* argument) {
  const std::unique_ptr<Raised> raised(static_cast<Raised*>(argument));
  PyErr_Restore(raised->type, raised->value, raised->traceback);
  return -1;
}

}  // namespace

bool is_first_thread() noexcept { return ::gettid() == ::getpid(); }

void raise_later() noexcept {
  std::unique_ptr<Raised> raised(new (std::nothrow) Raised);
  if (raised == nullptr) {
    PyErr_WriteUnraisable(nullptr);
    return;
  }
  PyErr_Fetch(&raised->type, &raised->value, &raised->traceback);
  if (Py_AddPendingCall(&raise_now, raised.get()) == 0) {
    static_cast<void>(raised.release());
    return;
  }
  // Too many of them wait already.
  PyErr_Restore(raised->type, raised->value, raised->traceback);
  PyErr_WriteUnraisable(nullptr);
}

void put_off_or_discard(pybind11::error_already_set& error) noexcept {
  if (is_first_thread() && !error.matches(PyExc_Exception)) {
    error.restore();
    raise_later();
  } else {
    error.discard_as_unraisable("eagercache");
  }
}

}  // namespace eagercache
