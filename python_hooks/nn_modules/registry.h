#pragma once

// The modules that were met, and the handlers on the Python side. The registry owns the
// records; a record goes with its module. Under the GIL.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "python_hooks/nn_modules/raise_later.h"
#include "python_hooks/nn_modules/record.h"

namespace eagercache {

// Calls a handler; what it raises is reported as unraisable and dropped. But for what a signal's
// handler raised meanwhile (KeyboardInterrupt), which is the program's.
template <typename... Args>
pybind11::object call_handler(const pybind11::object& handler, const Args&... args) noexcept {
  if (!handler || handler.is_none()) {
    return pybind11::none();
  }
  try {
    return handler(args...);
  } catch (pybind11::error_already_set& error) {
    put_off_or_discard(error);
  } catch (...) {
  }
  return pybind11::none();
}

// What the Python side is told, and when. Handlers run on the calling thread, with the GIL; they
// return quickly and what they raise is dropped.
struct ModuleHandlers {
  // (module) -> "watch" or "refuse": a module that has no record was called, and not below one that
  // is watched itself.
  pybind11::object select;
  // (module): it is to be looked at, for the first time or because something changed.
  pybind11::object look;
  // (module, args, kwargs, words, calls, gradients): a form of call without a verdict was answered
  // by the module's own forward, for the calls-th time (1, 2, 4, 8 ...); with gradients or without.
  pybind11::object missed;
  // (module): it keeps being called with an argument that no kernel can take, and has no kernel.
  pybind11::object unfit;
  // (module, digest, answer, expected) -> bool: what the kernel of that entry answered, and what
  // the forward did, in a call that was chosen to be checked (verification.h). True: the kernel is
  // wrong and answers no more, anywhere.
  pybind11::object is_wrong;
  // (module, digest, native_ns, kernel_ns): in the program's own calls its forward is faster than
  // the kernel of that entry, which answers no more (call_trials.h).
  pybind11::object lost;
  // (module) -> str: how people know it. Asked once a module, while a profiler listens.
  pybind11::object name;
};

// The modules met in this process. Guarded by the GIL. One leaked object.
class ModuleRegistry {
 public:
  static ModuleRegistry& instance();

  // Calls are answered, and unknown modules asked about, only while this is set.
  void set_active(bool active) noexcept { active_ = active; }
  bool active() const noexcept { return active_; }
  // Whether calls that need gradients are answered too.
  void set_training(bool training) noexcept { training_ = training; }
  bool training() const noexcept { return training_; }
  void set_handlers(ModuleHandlers handlers) { handlers_ = std::move(handlers); }
  const ModuleHandlers& handlers() const noexcept { return handlers_; }

  // nullptr when the module has none.
  std::shared_ptr<ModuleRecord> find(PyObject* module) noexcept;
  // Makes one, which goes when the module dies. Throws py::error_already_set.
  std::shared_ptr<ModuleRecord> adopt(PyObject* module);
  void forget(PyObject* module);
  // Forgets every module; kernels stay loaded.
  void forget_all();
  std::vector<std::shared_ptr<ModuleRecord>> records() const;

  // Gives the record a new guard, unless something changed since `version`: false then. With
  // `forget_forms` no kernel that it has answers any more, of whatever identity. With
  // `keeps_former` the guard that it had is kept beside the new one (ModuleRecord::keep_guard).
  bool set_guard(ModuleRecord& record, std::unique_ptr<ModuleGuard> guard,
                 const std::string& identity, std::uint64_t version, bool forget_forms,
                 bool keeps_former);
  // Something was assigned to `module`.
  void note_changed(PyObject* module) noexcept;
  // Asks the Python side to look at the module, once until it has.
  void ask_to_look(ModuleRecord& record);

 private:
  void unwatch(const ModuleRecord& record);

  bool active_ = false;
  bool training_ = false;
  ModuleHandlers handlers_;
  std::unordered_map<PyObject*, std::shared_ptr<ModuleRecord>> records_;
  std::unordered_map<PyObject*, PyObject*> weak_references_;  // by module; owned
  // Which records a module belongs to.
  std::unordered_multimap<PyObject*, ModuleRecord*> watchers_;
};

// Begins or ends a block in which this thread's calls are answered by forwards alone.
void modules_step_aside(bool begins) noexcept;

// Whether this thread is in such a block.
bool modules_are_aside() noexcept;

}  // namespace eagercache
