#pragma once

// Streams are torch's, which owns them. What is current is so for the calling thread.

#include <c10/core/Device.h>

namespace eagercache {

// The current stream of `device` as the raw handle that kernels take, or nullptr on CPU. Found at
// run time through the C shim of the torch that is loaded; nothing of CUDA is linked. False when
// the device's runtime cannot say (then the call must go native).
bool current_stream(c10::Device device, void** stream) noexcept;

}  // namespace eagercache
