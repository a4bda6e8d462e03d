#pragma once

// Called once, at import, with the GIL.

#include <pybind11/pybind11.h>

namespace eagercache {

// Adds DeployedProgram and the functions that write and check artifacts to the module.
void bind_deploy(pybind11::module_& module);

}  // namespace eagercache
