#include "python_hooks/nn_modules/guard.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace eagercache {
namespace {

namespace py = pybind11;

constexpr const char* kHookDictionaries[] = {"_forward_hooks", "_forward_pre_hooks",
                                             "_backward_hooks", "_backward_pre_hooks"};
constexpr std::size_t kForwardHooks = 2;  // so many of these are the forward's

constexpr const char* kModulesOfHooks[] = {"transformers.utils.output_capturing",
                                           "torch.nn.utils.weight_norm",
                                           "torch.nn.utils.spectral_norm"};

// Leaked: modules are called until the interpreter is gone.
std::vector<PyObject*>& global_hooks() {
  static auto* dictionaries = new std::vector<PyObject*>();
  return *dictionaries;
}

// An attribute of the instance that must be a dictionary.
py::object dictionary(const py::dict& attributes, const char* name) {
  PyObject* found = PyDict_GetItemString(attributes.ptr(), name);
  if (found == nullptr || !PyDict_Check(found)) {
    throw std::invalid_argument(std::string("the module has no ") + name);
  }
  return py::reinterpret_borrow<py::object>(found);
}

// The name of the Python module that a hook's code is of, borrowed; nullptr where it has none.
PyObject* module_of(PyObject* hook) noexcept {
  if (PyFunction_Check(hook)) {
    return PyFunction_GET_MODULE(hook);
  }
  PyTypeObject* type = Py_TYPE(hook);
  return PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) != 0 && type->tp_dict != nullptr
             ? PyDict_GetItemString(type->tp_dict, "__module__")
             : nullptr;
}

// Whether there are hooks, and all seem to be those that a module's kernels may know. Python says
// more exactly whether they are (known_hooks.py).
bool may_be_allowed(PyObject* hooks) noexcept {
  Py_ssize_t position = 0;
  PyObject* hook = nullptr;
  while (PyDict_Next(hooks, &position, nullptr, &hook) != 0) {
    PyObject* module = module_of(hook);
    if (module == nullptr || !PyUnicode_Check(module) ||
        std::ranges::none_of(kModulesOfHooks, [module](const char* name) {
          return PyUnicode_CompareWithASCIIString(module, name) == 0;
        })) {
      return false;
    }
  }
  return PyDict_GET_SIZE(hooks) != 0;
}

// Whether the variable is None, an empty dictionary or not set in this context.
bool is_idle(PyObject* collector) noexcept {
  PyObject* found = nullptr;
  if (PyContextVar_Get(collector, nullptr, &found) != 0) {
    PyErr_Clear();
    return false;
  }
  const py::object value = py::reinterpret_steal<py::object>(found);
  return !value || value.is_none() ||
         (PyDict_Check(value.ptr()) && PyDict_GET_SIZE(value.ptr()) == 0);
}

}  // namespace

void set_global_hooks(std::vector<py::object> dictionaries) {
  for (py::object& dictionary : dictionaries) {
    global_hooks().push_back(dictionary.release().ptr());
  }
}

bool global_hooks_are_set() noexcept {
  const auto& all = global_hooks();
  return std::any_of(all.begin(), all.end(),
                     [](PyObject* hooks) { return PyDict_GET_SIZE(hooks) != 0; });
}

void ModuleGuard::add_module(py::handle module) {
  PyTypeObject* type = Py_TYPE(module.ptr());
  Owner owner;
  owner.type = type;
  owner.type_version = version_of(type);
  if (owner.type_version == 0) {
    throw std::invalid_argument("changes of its class cannot be noticed");
  }
  const py::dict attributes = py::reinterpret_borrow<py::object>(module).attr("__dict__");
  owner.attributes = attributes;
  owner.version = DictVersion(attributes);
  owner.parameters = dictionary(attributes, "_parameters");
  owner.buffers = dictionary(attributes, "_buffers");
  owner.submodules = dictionary(attributes, "_modules");
  for (const char* name : kHookDictionaries) {
    owner.hooks.push_back(dictionary(attributes, name));
  }
  owner.is_refused =
      std::any_of(owner.hooks.begin(), owner.hooks.begin() + kForwardHooks,
                  [](const py::object& hooks) { return may_be_allowed(hooks.ptr()); });
  owner.num_parameters = PyDict_GET_SIZE(owner.parameters.ptr());
  owner.num_buffers = PyDict_GET_SIZE(owner.buffers.ptr());
  Py_ssize_t position = 0;
  PyObject* name = nullptr;
  PyObject* child = nullptr;
  while (PyDict_Next(owner.submodules.ptr(), &position, &name, &child) != 0) {
    owner.children.push_back({py::reinterpret_borrow<py::object>(name), child});
  }
  if (!modules_.empty()) {
    kept_.push_back(py::reinterpret_borrow<py::object>(module));
  }
  modules_.push_back(module.ptr());
  owners_.push_back(std::move(owner));
}

void ModuleGuard::add_attributes(const py::list& rows) {
  auto held = std::make_unique<ModuleValues>();
  held->add(rows);
  if (!held->same()) {
    throw std::runtime_error("its attributes changed while they were read");
  }
  owners_.at(owners_.size() - 1).held = std::move(held);
}

bool ModuleGuard::reads_attributes_of(PyObject* module) const noexcept {
  const auto found = std::find(modules_.begin(), modules_.end(), module);
  return found != modules_.end() &&
         owners_[static_cast<std::size_t>(found - modules_.begin())].held != nullptr;
}

bool ModuleGuard::reads_all_attributes() const noexcept {
  return std::all_of(owners_.begin(), owners_.end(),
                     [](const Owner& owner) { return owner.held != nullptr; });
}

void ModuleGuard::allow_forward_hooks(const std::optional<py::object>& collector) {
  if (collector && !PyContextVar_CheckExact(collector->ptr())) {
    throw std::invalid_argument("hooks collect into no variable of the context");
  }
  Owner& owner = owners_.at(owners_.size() - 1);
  owner.is_refused = false;
  for (std::size_t i = 0; i < kForwardHooks; ++i) {
    owner.allowed.emplace_back(owner.hooks[i]);
  }
  if (collector) {
    collector_ = *collector;
  }
}

PyObject* ModuleGuard::object_in(const Slot& slot) noexcept {
  PyObject* object = PyDict_GetItemWithError(slot.dict.ptr(), slot.name.ptr());
  for (const Step& step : slot.steps) {
    if (object == nullptr) {
      return nullptr;
    }
    const Py_ssize_t at = step.position;
    if (PyDict_CheckExact(object)) {
      object = PyDict_GetItemWithError(object, step.key.ptr());
    } else if (PyList_CheckExact(object)) {
      object = at >= 0 && at < PyList_GET_SIZE(object) ? PyList_GET_ITEM(object, at) : nullptr;
    } else if (PyTuple_CheckExact(object)) {
      object = at >= 0 && at < PyTuple_GET_SIZE(object) ? PyTuple_GET_ITEM(object, at) : nullptr;
    } else {
      return nullptr;
    }
  }
  return object;
}

std::size_t ModuleGuard::add_tensor(const std::string& kind, const std::string& name,
                                    const py::tuple& steps) {
  const Owner& owner = owners_.at(owners_.size() - 1);
  const py::object& dict = kind == "parameter" ? owner.parameters
                           : kind == "buffer"  ? owner.buffers
                                               : owner.attributes;
  py::object key = py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name.c_str()));
  Slot slot{dict, std::move(key), {}, nullptr, {}, nullptr};
  for (const py::handle step : steps) {
    const bool is_number = PyLong_CheckExact(step.ptr()) != 0;
    const Py_ssize_t position = is_number ? PyLong_AsSsize_t(step.ptr()) : -1;
    if (position == -1) {
      PyErr_Clear();  // a key that is no position
    }
    slot.steps.push_back({py::reinterpret_borrow<py::object>(step), position});
  }
  PyObject* object = object_in(slot);
  const at::Tensor* tensor = object == nullptr ? nullptr : exact_tensor(object);
  if (tensor == nullptr || !tensor->defined() ||
      !is_plain_or_empty(*tensor->unsafeGetTensorImpl())) {
    throw std::invalid_argument(kind + " " + name + " is no plain tensor");
  }
  // One without elements stays on the CPU where the module has it as a plain attribute.
  if (tensor->numel() != 0) {
    if (device_.value_or(tensor->device()) != tensor->device()) {
      throw std::invalid_argument("its tensors are on several devices");
    }
    device_ = tensor->device();
  }
  slot.object = object;
  slot.form = TensorForm::of(*tensor);
  slot.current = tensor;
  slots_.push_back(std::move(slot));
  labels_.push_back({owners_.size() - 1, kind});
  return slots_.size() - 1;
}

std::string ModuleGuard::tensor_name(std::size_t slot) const {
  std::string name = py::cast<std::string>(slots_.at(slot).name);
  for (const Step& step : slots_[slot].steps) {
    name += "[" + py::cast<std::string>(py::repr(step.key)) + "]";
  }
  // A module is added before those below it. One that has several places is named by its first.
  std::size_t at = labels_[slot].owner;
  for (std::size_t above = 0; above < at;) {
    const std::vector<Child>& children = owners_[above].children;
    const auto found = std::find_if(children.begin(), children.end(), [&](const Child& child) {
      return child.module == modules_[at];
    });
    if (found == children.end()) {
      ++above;
      continue;
    }
    name = py::cast<std::string>(found->name) + "." + name;
    at = std::exchange(above, 0);
  }
  return labels_[slot].kind + " " + name;
}

// Whether a module's dictionary has something else than it had.
bool ModuleGuard::is_changed(const Owner& owner) noexcept {
  if (!owner.version.is_written()) [[likely]] {
    return false;
  }
  if (owner.held == nullptr || !owner.held->same()) {
    return true;
  }
  owner.version.catch_up();
  return false;
}

ModuleGuard::Verdict ModuleGuard::check_hooks(const Owner& owner) noexcept {
  const bool others =
      std::any_of(owner.hooks.begin() + kForwardHooks, owner.hooks.end(),
                  [](const auto& hooks) { return PyDict_GET_SIZE(hooks.ptr()) != 0; });
  if (others) {
    return Verdict::kHooked;
  }
  Verdict verdict = Verdict::kSame;
  for (std::size_t i = 0; i < kForwardHooks; ++i) {
    PyObject* hooks = owner.hooks[i].ptr();
    const bool has_any = PyDict_GET_SIZE(hooks) != 0;
    const bool is_new = owner.allowed.empty() ? has_any : owner.allowed[i].is_written();
    if (!is_new) [[likely]] {
      continue;
    }
    if (has_any && (!may_be_allowed(hooks) || owner.is_refused)) {
      return Verdict::kHooked;
    }
    verdict = Verdict::kChanged;
  }
  return verdict;
}

std::vector<std::size_t> ModuleGuard::sharing() const {
  std::unordered_map<PyObject*, std::size_t> firsts;
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    found.push_back(firsts.try_emplace(object_in(slots_[i]), i).first->second);
  }
  return found;
}

bool ModuleGuard::take_others() const noexcept {
  try {
    if (sharing() != *sharing_) {
      return false;
    }
  } catch (const std::bad_alloc&) {
    return false;
  }
  for (const Slot& slot : slots_) {
    slot.object = object_in(slot);
  }
  return true;
}

ModuleGuard::Verdict ModuleGuard::check(bool* requires_grad) const noexcept {
  for (std::size_t i = 0; i < owners_.size(); ++i) {
    const Owner& owner = owners_[i];
    if (Py_TYPE(modules_[i]) != owner.type || owner.type->tp_version_tag != owner.type_version ||
        is_changed(owner) ||
        PyDict_GET_SIZE(owner.submodules.ptr()) != static_cast<Py_ssize_t>(owner.children.size()) ||
        PyDict_GET_SIZE(owner.parameters.ptr()) != owner.num_parameters ||
        PyDict_GET_SIZE(owner.buffers.ptr()) != owner.num_buffers) {
      return Verdict::kChanged;
    }
    if (const Verdict verdict = check_hooks(owner); verdict != Verdict::kSame) {
      return verdict;
    }
    // In their order, which a forward that goes through them reads.
    Py_ssize_t position = 0;
    PyObject* name = nullptr;
    PyObject* module = nullptr;
    for (const Child& child : owner.children) {
      if (PyDict_Next(owner.submodules.ptr(), &position, &name, &module) == 0 ||
          module != child.module || name != child.name.ptr()) {
        return Verdict::kChanged;
      }
    }
  }
  bool any_grad = false;
  bool any_other = false;
  for (const Slot& slot : slots_) {
    PyObject* object = object_in(slot);
    if (object != slot.object) [[unlikely]] {
      if (!sharing_ || object == nullptr) {
        return Verdict::kChanged;
      }
      any_other = true;
    }
    // The same object, or a new one at its address: in either case its own metadata is read.
    const at::Tensor* tensor = exact_tensor(object);
    if (tensor == nullptr || !tensor->defined() ||
        !slot.form.matches(*tensor->unsafeGetTensorImpl())) {
      return Verdict::kChanged;
    }
    any_grad = any_grad || tensor->requires_grad();
    slot.current = tensor;
  }
  if (any_other && !take_others()) {
    return Verdict::kChanged;
  }
  *requires_grad = any_grad;
  if (collector_ && !is_idle(collector_.ptr())) [[unlikely]] {
    return Verdict::kHooked;
  }
  return values_.same() ? Verdict::kSame : Verdict::kChanged;
}

}  // namespace eagercache
