#pragma once

// Whether a module is still what its kernels were made for. A record owns its guard; a guard owns
// references to what is below the module. Under the GIL.

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "python_hooks/nn_modules/arguments.h"
#include "python_hooks/nn_modules/places/dict_version.h"
#include "python_hooks/nn_modules/places/values.h"

namespace eagercache {

// What one module and everything below it looked like when its kernels' key was made, and the check
// that it still does: the same classes with nothing assigned to them, the same submodules, no
// hooks, and tensors of the same metadata under the same names. Attributes are read one by one only
// where a module's dictionary was written to, which is seen, in whatever way. What is inside of an
// attribute is read: a list, a configuration.
//
// Everything needs the GIL. Holds references to the submodules and to their dictionaries, not to
// the module itself; so it must not outlive it.
class ModuleGuard {
 public:
  enum class Verdict { kSame, kChanged, kHooked };

  ModuleGuard() = default;
  ModuleGuard(const ModuleGuard&) = delete;
  ModuleGuard& operator=(const ModuleGuard&) = delete;

  // Adds one module of the tree; the first one is the root. Throws py::error_already_set or
  // std::invalid_argument when the object is no ordinary torch.nn.Module.
  void add_module(pybind11::handle module);

  // What the module that was added last has among its forward hooks and those before its forward is
  // known to its kernels, unless it changes. Where a `collector` is given, a variable of the
  // context, some do nothing only while that is None or empty. Throws py::error_already_set or
  // std::invalid_argument.
  void allow_forward_hooks(const std::optional<pybind11::object>& collector);

  // What the dictionary of the module that was added last has, as rows of ModuleValues: a write to
  // it that leaves this as it is changes nothing. Without it each write is a change. Throws
  // std::invalid_argument, and std::runtime_error where the dictionary has something else by now.
  void add_attributes(const pybind11::list& rows);

  // Adds the tensor `name` of the module added last; `kind` names its dictionary: "parameter",
  // "buffer" or "attribute". Returns its slot. Throws std::invalid_argument when it is not plain or
  // not on the device of the others. `steps` lead from an attribute that is a list, tuple or dict
  // to the tensor, by positions and keys (of strings or integers).
  std::size_t add_tensor(const std::string& kind, const std::string& name,
                         const pybind11::tuple& steps = pybind11::tuple());

  // Nothing else of the module leads to one of its tensors: another one in its place is as good, if
  // its metadata is the same, and those places have one tensor that had one.
  // To be called once all are added.
  void allow_other_tensors() { sharing_ = sharing(); }

  // What is inside of attributes, added to by the caller before the first check.
  ModuleValues& values() noexcept { return values_; }
  const ModuleValues& values() const noexcept { return values_; }

  // Whether the tree is as it was added. Fills `requires_grad`. About 10 ns a module and a tensor.
  Verdict check(bool* requires_grad) const noexcept;

  // The tensor in a slot; valid after check() gave kSame, until Python code runs.
  const at::Tensor& tensor(std::size_t slot) const noexcept { return *slots_[slot].current; }
  std::size_t num_tensors() const noexcept { return slots_.size(); }
  // What people call it: "parameter layers.0.scale".
  std::string tensor_name(std::size_t slot) const;
  // Where the tensors with elements are; nothing when there are none.
  std::optional<c10::Device> device() const noexcept { return device_; }
  // The submodules, the root first; borrowed.
  const std::vector<PyObject*>& modules() const noexcept { return modules_; }
  // Whether check() finds out itself what a write to an attribute of `module` did.
  bool reads_attributes_of(PyObject* module) const noexcept;
  // The same of all modules: check() may be asked again after it did not give kSame.
  bool reads_all_attributes() const noexcept;

 private:
  struct Child {
    pybind11::object name;
    PyObject* module;  // kept alive by kept_
  };
  struct Owner {
    PyTypeObject* type = nullptr;
    unsigned int type_version = 0;
    pybind11::object attributes, parameters, buffers, submodules;
    mutable DictVersion version;          // of its attributes
    std::unique_ptr<ModuleValues> held;   // the attributes, if add_attributes() was called
    std::vector<pybind11::object> hooks;  // the forward hooks first, then those before the forward
    std::vector<DictVersion> allowed;     // of these two, where hooks may be there
    bool is_refused = false;              // has such hooks, which were looked at and not allowed
    Py_ssize_t num_parameters = 0;
    Py_ssize_t num_buffers = 0;
    std::vector<Child> children;
  };
  struct Step {
    pybind11::object key;  // of a dict
    Py_ssize_t position;   // in a list or tuple, if the key is one; else -1
  };
  struct Slot {
    pybind11::object dict;
    pybind11::object name;
    std::vector<Step> steps;
    mutable PyObject* object;  // identity only
    TensorForm form;
    mutable const at::Tensor* current = nullptr;
  };

  // For people; apart from the slots, which every call goes through.
  struct Label {
    std::size_t owner;  // index into owners_
    std::string kind;   // as add_tensor() got it
  };

  static bool is_changed(const Owner& owner) noexcept;
  static Verdict check_hooks(const Owner& owner) noexcept;
  // What is in a slot's place now, borrowed; nullptr where nothing is.
  static PyObject* object_in(const Slot& slot) noexcept;
  // For each slot the first one that has the same object now.
  std::vector<std::size_t> sharing() const;
  // Takes the tensors that are in the places now, if they are one where those before were.
  bool take_others() const noexcept;

  std::vector<PyObject*> modules_;
  std::vector<pybind11::object> kept_;  // the submodules without the root
  std::vector<Owner> owners_;
  std::vector<Slot> slots_;
  std::optional<std::vector<std::size_t>> sharing_;  // where other tensors are taken
  std::optional<c10::Device> device_;
  std::vector<Label> labels_;  // of the slots
  ModuleValues values_;
  pybind11::object collector_;  // of the hooks that are allowed
};

// The dictionaries of hooks on all modules (torch.nn.modules.module._global_*_hooks); called once.
void set_global_hooks(std::vector<pybind11::object> dictionaries);
bool global_hooks_are_set() noexcept;

}  // namespace eagercache
