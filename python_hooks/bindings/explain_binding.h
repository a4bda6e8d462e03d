#pragma once

// Called once, at import, with the GIL.

#include <pybind11/pybind11.h>

namespace eagercache {

// operator_effects(), and the Explainer behind eagercache.explain().
void bind_explain(pybind11::module_& module);

}  // namespace eagercache
