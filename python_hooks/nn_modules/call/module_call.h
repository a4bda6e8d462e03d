#pragma once

// One call of a module, as vectorcall gives it. Under the GIL.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "python_hooks/nn_modules/objects.h"

namespace eagercache {

// Watched modules whose own forward runs on this thread right now.
inline constinit thread_local int watched_depth = 0;

// Counts a watched module's forward for as long as it runs.
class WatchedScope {
 public:
  WatchedScope() noexcept { ++watched_depth; }
  ~WatchedScope() { --watched_depth; }
  WatchedScope(const WatchedScope&) = delete;
  WatchedScope& operator=(const WatchedScope&) = delete;
};

// The arguments as vectorcall gives them, `args[0]` being the module.
struct ModuleCall {
  PyObject* original;
  PyObject* const* args;
  std::size_t nargsf;
  PyObject* names;
  std::uint64_t began = 0;  // of one that is timed (trial_clock()); else 0

  std::size_t count() const noexcept {
    return static_cast<std::size_t>(PyVectorcall_NARGS(nargsf));
  }
  PyObject* forward() const noexcept { return PyObject_Vectorcall(original, args, nargsf, names); }
  PyObject* forward_watched() const noexcept {
    const WatchedScope scope;
    return forward();
  }
  pybind11::tuple positional() const {
    pybind11::tuple values(count() - 1);
    for (std::size_t i = 1; i < count(); ++i) {
      values[i - 1] = pybind11::reinterpret_borrow<pybind11::object>(args[i]);
    }
    return values;
  }
  pybind11::dict keywords() const {
    pybind11::dict values;
    const Py_ssize_t size = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t i = 0; i < size; ++i) {
      values[pybind11::handle(PyTuple_GET_ITEM(names, i))] =
          pybind11::reinterpret_borrow<pybind11::object>(
              args[count() + static_cast<std::size_t>(i)]);
    }
    return values;
  }
};

// The arguments of a call. Forwards change objects, so that those are copied before one runs.
struct ModuleArguments {
  pybind11::tuple positional;
  pybind11::dict keywords;

  static ModuleArguments of(const ModuleCall& call, bool copies) {
    ModuleArguments made{call.positional(), call.keywords()};
    if (copies) {
      const pybind11::tuple copied =
          copy_of_objects(pybind11::make_tuple(made.positional, made.keywords));
      made.positional = copied[0];
      made.keywords = copied[1];
    }
    return made;
  }
};

}  // namespace eagercache
