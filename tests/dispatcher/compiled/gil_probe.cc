// A Python module for check_gil.py.

#include <Python.h>

#include <ATen/ATen.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace {

// Outlives the function below when a thread hangs.
struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  int calls = 0;       // guarded by mutex
  bool wrong = false;  // guarded by mutex
};

void call_var(std::int64_t size, int calls, const std::shared_ptr<Progress>& progress) {
  const at::Tensor x = at::arange(size * size, at::kFloat).reshape({size, size});
  // Of `size` consecutive numbers, in every row.
  const double expected = static_cast<double>(size) * static_cast<double>(size + 1) / 12.0;
  for (int i = 0; i < calls; ++i) {
    const at::Tensor result = at::var(x, at::IntArrayRef{1}, at::Scalar(1), /*keepdim=*/false);
    const bool wrong = (result / expected - 1).abs().max().item<double>() > 1e-2;
    std::lock_guard lock(progress->mutex);
    ++progress->calls;
    progress->wrong = progress->wrong || wrong;
    progress->changed.notify_all();
  }
}

// Calls at::var on another thread and waits for it with the interpreter's lock held. Returns the
// number of calls made within a minute (a thread that waits for the lock makes none), or -1 when a
// result was wrong.
PyObject* call_var_without_letting_go(PyObject* /*module*/, PyObject* arguments) {
  long long size = 0;
  int calls = 0;
  if (PyArg_ParseTuple(arguments, "Li", &size, &calls) == 0) {
    return nullptr;
  }
  const auto progress = std::make_shared<Progress>();
  std::thread(call_var, size, calls, progress).detach();
  int made = 0;
  {
    std::unique_lock lock(progress->mutex);
    progress->changed.wait_for(lock, std::chrono::minutes(1),
                               [&] { return progress->calls == calls; });
    made = progress->wrong ? -1 : progress->calls;
  }
  return PyLong_FromLong(made);
}

PyMethodDef methods[] = {
    {"call_var_without_letting_go", call_var_without_letting_go, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "gil_probe", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit_gil_probe() { return PyModule_Create(&definition); }
