#pragma once

// Errors of signal handlers (KeyboardInterrupt) that come while a call of ours must not fail.

#include <pybind11/pybind11.h>

namespace eagercache {

// Whether this is the thread on which Python runs the handlers of signals.
bool is_first_thread() noexcept;

// Takes the interpreter's current error away and has it raised as soon as the interpreter's first
// thread goes on: for what a signal's handler raised (KeyboardInterrupt) where a call of ours must
// not fail. Needs the GIL and an error.
void raise_later() noexcept;

// Ends an error of Python code that we called for ourselves: what a signal's handler raised
// meanwhile is the program's and is raised later, the rest goes to sys.unraisablehook. Needs the
// GIL.
void put_off_or_discard(pybind11::error_already_set& error) noexcept;

}  // namespace eagercache
