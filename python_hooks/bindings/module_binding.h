#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "guards/key/call_key.h"

namespace eagercache {

// Adds what accelerates whole modules to the Python module.
void bind_modules(pybind11::module_& module);

// The words of a form's key, as Python holds it. Throws ValueError for bytes that are none.
std::vector<Word> words_of(const pybind11::bytes& key);

}  // namespace eagercache
