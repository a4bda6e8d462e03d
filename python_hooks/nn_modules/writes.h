#pragma once

// Kernels that write into tensors of a call, as a forward does that fills a cache of fixed size, or
// into buffers of the module, as norms do in training mode; and what a kernel changes beside
// tensors. Under the GIL.

#include <Python.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

#include "python_hooks/nn_modules/arguments.h"
#include "python_hooks/nn_modules/guard.h"
#include "python_hooks/nn_modules/record.h"

namespace eagercache {

// Where an input of a kernel is in a call: counts come behind the tensors (take_counts).
inline const at::Tensor& input_of(const ModuleKernel::Input& input, const ModuleGuard& guard,
                                  const ModuleCallForm& form) noexcept {
  if (input.from_module) {
    return guard.tensor(input.index);
  }
  const std::size_t tensors = form.tensors.size();
  return input.index < tensors ? *form.tensors[input.index]
                               : form.count_tensors[input.index - tensors];
}

// Whether the kernel may write: what it writes into is of no other input, so that it may be written
// at any time, and eager would not raise. The forward answers otherwise.
bool may_write(const ModuleKernel& kernel, const ModuleGuard& guard, const ModuleCallForm& form);

// What the kernel writes into, held: other threads may give the module other tensors while the GIL
// is released.
c10::SmallVector<at::Tensor, 4> written_tensors(const ModuleKernel& kernel,
                                                const ModuleGuard& guard,
                                                const ModuleCallForm& form);

// Moves the version counters of these as the forward does. After the kernel has answered.
void move_versions(const ModuleKernel& kernel, c10::ArrayRef<at::Tensor> written);

// What a kernel changes: the call's objects, and modules whose attributes it assigns; and the
// arguments that it assigns to some. To be called before the GIL is released: the guard may be
// another one then. An empty tuple, mostly, which costs nothing.
pybind11::tuple changed_objects(const ModuleKernel& kernel, const ModuleGuard& guard,
                                const ModuleCallForm& form);

// What the caller gets when such a kernel fails: it may have written, so the forward must not run.
void raise_undefined(const ModuleKernel& kernel);

}  // namespace eagercache
