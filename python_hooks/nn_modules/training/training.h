#pragma once

// Calls of modules that need gradients: the forward's kernel, and the node of autograd that holds
// the backward's. Plans are never destroyed; a node owns what it saved until it is released. The
// forward runs under the GIL; a backward pass runs on whatever thread autograd has.

#include <pybind11/pybind11.h>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <vector>

#include "python_hooks/nn_modules/guard.h"
#include "python_hooks/nn_modules/record.h"
#include "python_hooks/nn_modules/training/training_plan.h"

namespace eagercache {

// Adds to the form of a call which tensors need gradients: those of the module, then the
// arguments. Its own words go before those of the thread's state.
void put_gradients(const ModuleGuard& guard, ModuleCallForm& form);

// Whether hooks of torch.autograd.graph look at what is saved: activation checkpointing counts it.
bool saved_tensors_are_watched();

// Answers one call with the forward and puts a node into autograd's graph, whose backward is the
// other half. `call` is what `kept_call` gives, which the node keeps for what no kernel can do.
// `inputs` are the container's but for its masks, which are drawn here; `plan` is the kernel's for
// the call's sizes, and `strides` are those of the answers. Fills `answers`, which are native's in
// layout. On anything but kAnswered nothing was written, and the program's generator is
// where it was. Needs the GIL, and releases it.
LoadedKernel::Outcome answer_with_gradients(const ModuleKernel& kernel,
                                            const std::shared_ptr<const ModuleTraining>& plan,
                                            const std::vector<std::vector<std::int64_t>>& strides,
                                            std::vector<at::Tensor> inputs, pybind11::tuple call,
                                            c10::SmallVector<at::Tensor, 4>& answers);

// (module, args, kwargs, values_changes) as a node keeps it: `...` stands for an argument that is
// rebuilt, copies for objects, which may be others by the time of the backward; `values_changes` is
// the record's. Needs the GIL.
pybind11::tuple kept_call(const ModuleTraining& plan, const pybind11::handle& module,
                          pybind11::tuple args, pybind11::dict kwargs, bool has_objects,
                          std::uint64_t values_changes);

// Whether a call with these inputs may be recorded at all.
bool may_be_recorded(const ModuleKernel& kernel, const std::vector<at::Tensor>& inputs);

}  // namespace eagercache
