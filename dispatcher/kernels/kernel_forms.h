#pragma once

// From what a manifest says to an object that answers calls. The caller owns what is made.
// Libraries are never unloaded, so that a kernel may outlive the object that opened its own. Any
// thread.

#include <memory>
#include <span>
#include <string>

#include "dispatcher/kernels/loaded_kernel.h"
#include "dispatcher/plans/contract.h"
#include "kernel_cache/base/status.h"
#include "kernel_cache/format/manifest.h"
#include "kernel_cache/loading/shared_library.h"

namespace eagercache {

// Two entries with the same identity have the same kernel, so that it is loaded once. One object
// may hold the kernels of many entries; and entries may have the plan and the first object in
// common and differ in the second.
std::string kernel_identity(std::span<const ObjectRef> objects, c10::Device device,
                            const KernelForm& form);

// kIncompatible for a form that make_kernel does not know.
Status check_form(const std::string& form);

// A kernel of either form for CPU out of a loaded library. kCorrupt for malformed facts,
// kIncompatible for an unknown form or a library that does not hold what the facts say.
Result<std::unique_ptr<LoadedKernel>> make_kernel(const SharedLibrary& library, c10::Device device,
                                                  const KernelForm& form);

// A kernel of either form for CUDA out of its cubins' bytes, loaded on `device`. As above.
Result<std::unique_ptr<LoadedKernel>> make_cuda_kernel(std::span<const std::string> objects,
                                                       c10::Device device, const KernelForm& form);

}  // namespace eagercache
