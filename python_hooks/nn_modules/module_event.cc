#include "python_hooks/nn_modules/module_event.h"

#include <ATen/SequenceNumber.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace eagercache {
namespace {

namespace py = pybind11;

// "layers.0.mlp", or the module's class where no model that it is a part of was called.
const std::string& shown_name(ModuleRecord& record, const py::object& name) {
  if (record.shown.empty()) {
    try {
      record.shown = py::cast<std::string>(name(py::handle(record.module)));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("eagercache");
    } catch (const py::cast_error&) {
    }
  }
  if (record.shown.empty()) {
    record.shown = Py_TYPE(record.module)->tp_name;
  }
  return record.shown;
}

}  // namespace

void begin_event(std::optional<ProfileEvent>& event, ModuleRecord& record,
                 const ModuleKernel& kernel, const ModuleCallForm& form,
                 const py::object& name) noexcept {
  std::optional<at::StepCallbacks> listeners = profile_listeners();
  if (!listeners) [[likely]] {
    return;
  }
  try {
    // The node of autograd that this call makes has the next number.
    const std::int64_t sequence =
        kernel.training == nullptr ? -1
                                   : static_cast<std::int64_t>(at::sequence_number::peek());
    event.emplace(std::move(*listeners),
                  module_event_name(shown_name(record, name), kernel.digest),
                  std::span<const at::Tensor* const>(form.tensors.data(), form.tensors.size()),
                  sequence);
  } catch (...) {
    // Out of memory: the profile lacks one event.
  }
}

}  // namespace eagercache
