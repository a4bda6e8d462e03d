#pragma once

// Functions of a library that is opened at run time. Any thread.

#include <dlfcn.h>

namespace eagercache {

// The library's function of that name, with the type that its documentation gives it; whether there
// is one.
template <typename Function>
bool find_symbol(void* library, const char* name, Function& function) noexcept {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace eagercache
