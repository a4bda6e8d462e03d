#pragma once

// A call that a kernel answers: its run, what it wrote, and its answer as Python objects.

#include "python_hooks/nn_modules/arguments.h"
#include "python_hooks/nn_modules/call/module_call.h"
#include "python_hooks/nn_modules/record.h"
#include "python_hooks/nn_modules/shape_class.h"

namespace eagercache {

// The forward's answer, counted by the reason.
PyObject* answer_aside(ModuleRecord& record, ModuleAside reason, const ModuleCall& call);

// Makes the tensors that stand for the counts which the kernel takes.
void take_counts(const ModuleKernel& kernel, c10::Device device, ModuleCallForm& form);

// The kernel's answer, or the forward's where the kernel cannot answer after all. `layout` is what
// the kernel's class says for the call; null for a kernel of one form of call. nullptr with an
// exception, which is what the forward raised, or says that an argument is half written.
PyObject* answer_by_kernel(ModuleRecord& record, ModuleKernel& kernel,
                           const ModuleShapeClass::Layout* layout, const ModuleCall& call,
                           const ModuleCallForm& form);

}  // namespace eagercache
