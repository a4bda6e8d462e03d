#include "python_hooks/nn_modules/registry.h"

#include <iterator>

namespace eagercache {

namespace py = pybind11;

namespace {

// Blocks on this thread in which forwards answer.
thread_local int aside_depth = 0;

}  // namespace

void modules_step_aside(bool begins) noexcept { aside_depth += begins ? 1 : -1; }

bool modules_are_aside() noexcept { return aside_depth != 0; }

ModuleRegistry& ModuleRegistry::instance() {
  static auto* registry = new ModuleRegistry();
  return *registry;
}

std::shared_ptr<ModuleRecord> ModuleRegistry::find(PyObject* module) noexcept {
  const auto found = records_.find(module);
  return found == records_.end() ? nullptr : found->second;
}

std::shared_ptr<ModuleRecord> ModuleRegistry::adopt(PyObject* module) {
  std::shared_ptr<ModuleRecord>& record = records_[module];
  if (record == nullptr) {
    py::cpp_function gone([this, module](py::handle) { forget(module); });
    PyObject* reference = PyWeakref_NewRef(module, gone.ptr());
    if (reference == nullptr) {
      records_.erase(module);
      throw py::error_already_set();
    }
    weak_references_[module] = reference;
    record = std::make_shared<ModuleRecord>(module);
  }
  return record;
}

void ModuleRegistry::unwatch(const ModuleRecord& record) {
  if (record.guard == nullptr) {
    return;
  }
  for (PyObject* module : record.guard->modules()) {
    const auto [first, last] = watchers_.equal_range(module);
    for (auto at = first; at != last;) {
      at = at->second == &record ? watchers_.erase(at) : std::next(at);
    }
  }
}

void ModuleRegistry::forget(PyObject* module) {
  const auto found = records_.find(module);
  if (found == records_.end()) {
    return;
  }
  const std::shared_ptr<ModuleRecord> record = std::move(found->second);
  records_.erase(found);
  unwatch(*record);
  const auto reference = weak_references_.find(module);
  if (reference != weak_references_.end()) {
    const py::object dropped = py::reinterpret_steal<py::object>(reference->second);
    weak_references_.erase(reference);
  }
}

void ModuleRegistry::forget_all() {
  while (!records_.empty()) {
    forget(records_.begin()->first);
  }
}

std::vector<std::shared_ptr<ModuleRecord>> ModuleRegistry::records() const {
  std::vector<std::shared_ptr<ModuleRecord>> all;
  for (const auto& [module, record] : records_) {
    all.push_back(record);
  }
  return all;
}

bool ModuleRegistry::set_guard(ModuleRecord& record, std::unique_ptr<ModuleGuard> guard,
                               const std::string& identity, std::uint64_t version,
                               bool forget_forms, bool keeps_former) {
  record.asked = false;
  if (record.version != version) {
    return false;
  }
  const std::uint64_t counted = record.hits + record.native + record.pending;
  record.looks_in_vain = counted == record.counted_before ? record.looks_in_vain + 1 : 0;
  record.looks_without_hits = record.hits == record.hits_before ? record.looks_without_hits + 1 : 0;
  record.counted_before = counted;
  record.hits_before = record.hits;
  unwatch(record);
  for (PyObject* module : guard->modules()) {
    watchers_.emplace(module, &record);
  }
  // Old ones may hold the last reference to a submodule, whose end runs code.
  const std::unique_ptr<ModuleGuard> oldest = std::move(record.kept_guard);
  if (keeps_former && !forget_forms && record.guard_identity != identity) {
    record.keep_guard(*guard);
  }
  const std::unique_ptr<ModuleGuard> old = std::exchange(record.guard, std::move(guard));
  record.guard_identity = identity;
  if (forget_forms) {
    record.forget_forms();
  }
  record.use_identity(identity);
  record.state = ModuleRecord::State::kWatched;
  record.valid = true;
  return true;
}

void ModuleRegistry::note_changed(PyObject* module) noexcept {
  if (watchers_.empty()) {
    return;
  }
  const auto [first, last] = watchers_.equal_range(module);
  for (auto at = first; at != last; ++at) {
    ModuleRecord& record = *at->second;
    if (record.valid && record.guard->reads_attributes_of(module)) {
      ++record.version;  // for a look at it that has begun
    } else {
      record.invalidate();
    }
  }
}

void ModuleRegistry::ask_to_look(ModuleRecord& record) {
  if (!record.asked) {
    record.asked = true;
    call_handler(handlers_.look, py::handle(record.module));
  }
}

}  // namespace eagercache
