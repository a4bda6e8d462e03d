#pragma once

// What changes a forward's answer beside the module and the arguments: state of the thread and of
// the process, and the device.

#include <c10/core/Device.h>

#include "python_hooks/nn_modules/arguments.h"
#include "python_hooks/nn_modules/guard.h"
#include "python_hooks/nn_modules/record.h"

namespace eagercache {

// Why no kernel answers in the thread's and the process's state; kNone where one may.
ModuleAside thread_reason();

// Process and thread state that changes what a forward on `device` computes. The last word is the
// GPU's index and one, 0 for the CPU: everything before it is the same on all GPUs.
void put_state(ModuleCallForm& form, c10::Device device);

// The one device of a call; kTensorKind when there are several. What a forward makes on "cuda" is
// made on the thread's current GPU, so that this has to be the same.
ModuleAside find_device(const ModuleGuard& guard, const ModuleCallForm& form, c10::Device* device);

}  // namespace eagercache
