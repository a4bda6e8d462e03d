#include "dispatcher/device/device_stream.h"

#include <dlfcn.h>

#include <cstdint>

namespace eagercache {

bool current_stream(c10::Device device, void** stream) noexcept {
  *stream = nullptr;
  if (device.is_cpu()) {
    return true;
  }
  using GetStream = std::int32_t (*)(std::int32_t, void**);
  // libtorch_cuda is in the process whenever a CUDA tensor is.
  static const auto get_stream =
      reinterpret_cast<GetStream>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  return get_stream != nullptr && device.is_cuda() && get_stream(device.index(), stream) == 0;
}

}  // namespace eagercache
