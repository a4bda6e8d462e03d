#pragma once

#include <pybind11/pybind11.h>

#include "dispatcher/runtime/miss_handler.h"

namespace eagercache {

// Hands compile requests to a Python callable `submit(call_json: str)`, and entries that were put
// aside to `put_aside(digest: str, reason: str)`, which may be None. Takes the GIL in submit (on
// the loader thread) and lets go of it in run_blocking. After close() it does nothing, so that no
// thread enters Python while the interpreter goes down.
class PythonMissHandler final : public MissHandler {
 public:
  // Requires the GIL. The callables are kept for ever: the last owner may be a thread without the
  // GIL.
  PythonMissHandler(pybind11::function submit, pybind11::object put_aside);

  void submit(const CompileRequest& request) override;
  // What the callable raises is reported as unraisable.
  void note_put_aside(const std::string& digest, const std::string& reason) noexcept override;
  // Signals are looked at between two calls of `wait`. What their handlers raise
  // (KeyboardInterrupt) ends the waiting, and is raised once the interpreter goes on: the call
  // itself has its answer.
  void run_blocking(const std::function<bool()>& wait) override;

 private:
  PyObject* submit_;  // owned references, never released
  PyObject* put_aside_;
};

}  // namespace eagercache
