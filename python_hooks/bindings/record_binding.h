#pragma once

// Called once, at import, with the GIL.

#include <pybind11/pybind11.h>

namespace eagercache {

// Recording of calls, and keys out of their descriptions.
void bind_record(pybind11::module_& module);

}  // namespace eagercache
