#include "dispatcher/deployed/program_device.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "dispatcher/device/cuda_driver.h"

namespace eagercache {

Result<c10::Device> program_device(const std::string& gpu, std::optional<c10::Device> wanted) {
  if (gpu.empty()) {
    if (wanted && !wanted->is_cpu()) {
      return Status(StatusCode::kInvalidArgument,
                    "the module was exported on the CPU and cannot run on " + wanted->str());
    }
    return c10::Device(c10::DeviceType::CPU);
  }
  const std::string made_for = "the module was exported on a GPU (" + gpu + ")";
  if (wanted && !wanted->is_cuda()) {
    return Status(StatusCode::kInvalidArgument, made_for + " and cannot run on " + wanted->str());
  }
  if (CudaDriver::get() == nullptr || !at::globalContext().hasCUDA()) {
    return Status(StatusCode::kIncompatible,
                  made_for + ", and this process has none that torch can use");
  }
  const c10::impl::VirtualGuardImpl runtime(c10::DeviceType::CUDA);
  const c10::Device device = wanted && wanted->has_index() ? *wanted : runtime.getDevice();
  if (device.index() >= runtime.deviceCount()) {
    return Status(StatusCode::kInvalidArgument, "there is no " + device.str() + " in this process");
  }
  if (const std::string here = cuda_architecture(device); here != gpu) {
    return Status(StatusCode::kIncompatible,
                  made_for + ", and " + device.str() + " is another kind (" + here + ")");
  }
  return device;
}

}  // namespace eagercache
