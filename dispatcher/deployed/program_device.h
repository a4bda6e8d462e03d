#pragma once

// The device that a deployed module runs on. Any thread; creates no CUDA context.

#include <c10/core/Device.h>

#include <optional>
#include <string>

#include "kernel_cache/base/status.h"

namespace eagercache {

// The fact of an artifact that says which GPUs its code is for, as cuda_architecture() tells it;
// not there in one for the CPU.
inline constexpr const char* kGpuFact = "gpu";

// Where code that is for such a `gpu` (empty: for the CPU) runs in this process: on the device that
// is `wanted` or, where none is, on the CPU or the thread's current GPU. kInvalidArgument for a
// device of the other type, or a GPU that is not there; kIncompatible where torch has no GPU here,
// or one of another kind. Has an index unless it is the CPU.
Result<c10::Device> program_device(const std::string& gpu, std::optional<c10::Device> wanted);

}  // namespace eagercache
