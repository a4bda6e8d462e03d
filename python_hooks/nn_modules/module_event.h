#pragma once

// What profilers see of a module whose kernel answers. Under the GIL.

#include <pybind11/pybind11.h>

#include <optional>

#include "dispatcher/kernels/profile_event.h"
#include "python_hooks/nn_modules/record.h"

namespace eagercache {

// Begins the event of a hit where somebody listens; without one `event` stays empty. `form` has the
// call's tensors, and `name` is the handler that names the module (call.h), which is asked once a
// module.
void begin_event(std::optional<ProfileEvent>& event, ModuleRecord& record,
                 const ModuleKernel& kernel, const ModuleCallForm& form,
                 const pybind11::object& name) noexcept;

}  // namespace eagercache
