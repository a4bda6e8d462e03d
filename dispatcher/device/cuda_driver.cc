#include "dispatcher/device/cuda_driver.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <dlfcn.h>

#include <array>
#include <atomic>

#include "dispatcher/device/device_stream.h"
#include "dispatcher/device/symbol.h"

namespace eagercache {
namespace {

bool find_all(void* library, CudaDriver& driver) noexcept {
  find_symbol(library, "cuFuncLoad", driver.func_load);  // may be missing
  return find_symbol(library, "cuInit", driver.init) &&
         find_symbol(library, "cuModuleLoadData", driver.module_load_data) &&
         find_symbol(library, "cuModuleUnload", driver.module_unload) &&
         find_symbol(library, "cuModuleGetFunction", driver.module_get_function) &&
         find_symbol(library, "cuFuncSetAttribute", driver.func_set_attribute) &&
         find_symbol(library, "cuLaunchKernel", driver.launch_kernel) &&
         find_symbol(library, "cuCtxGetCurrent", driver.ctx_get_current) &&
         find_symbol(library, "cuCtxSetCurrent", driver.ctx_set_current) &&
         find_symbol(library, "cuDeviceGet", driver.device_get) &&
         find_symbol(library, "cuDeviceGetAttribute", driver.device_get_attribute) &&
         find_symbol(library, "cuDevicePrimaryCtxRetain", driver.primary_ctx_retain) &&
         find_symbol(library, "cuStreamIsCapturing", driver.stream_is_capturing) &&
         find_symbol(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode) &&
         find_symbol(library, "cuGetErrorString", driver.get_error_string);
}

}  // namespace

const CudaDriver* CudaDriver::get() noexcept {
  static const CudaDriver* const found = []() -> const CudaDriver* {
    // In the process already whenever there is a CUDA tensor.
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    static CudaDriver driver{};
    return library != nullptr && find_all(library, driver) ? &driver : nullptr;
  }();
  return found;
}

std::string CudaDriver::describe(Result error) const {
  const char* text = nullptr;
  if (get_error_string(error, &text) == kSuccess && text != nullptr) {
    return text;
  }
  return "CUDA error " + std::to_string(error);
}

RelaxedCapture::RelaxedCapture() noexcept : driver_(CudaDriver::get()) {
  if (driver_ != nullptr) {
    driver_->exchange_capture_mode(&mode_);
  }
}

RelaxedCapture::~RelaxedCapture() {
  if (driver_ != nullptr) {
    driver_->exchange_capture_mode(&mode_);
  }
}

namespace {

// The driver's handle of a GPU, in a process that may have asked nothing of the driver before.
bool find_device(const CudaDriver& driver, int ordinal, int* handle) noexcept {
  constexpr CudaDriver::Result kNotInitialized = 3;
  CudaDriver::Result result = driver.device_get(handle, ordinal);
  if (result == kNotInitialized && driver.init(0) == CudaDriver::kSuccess) {
    result = driver.device_get(handle, ordinal);
  }
  return result == CudaDriver::kSuccess;
}

}  // namespace

bool is_sticky_cuda_error(CudaDriver::Result error) noexcept {
  // CUresult: ECC, NVLink, contained and hardware errors (214, 220 to 227), the context is gone
  // (709), and what a kernel does to its context (700, 702, 710 to 721).
  return error == 214 || (error >= 220 && error <= 227) || error == 700 || error == 702 ||
         error == 709 || (error >= 710 && error <= 721 && error != 712 && error != 713);
}

namespace {

bool is_context_lost(c10::Device device) noexcept {
  const CudaDriver* const driver = CudaDriver::get();
  void* stream = nullptr;
  int status = 0;
  return driver != nullptr && current_stream(device, &stream) &&
         is_sticky_cuda_error(driver->stream_is_capturing(stream, &status));
}

bool memory_ran_out(c10::Device device) noexcept {
  constexpr std::size_t kMaxDevices = 64;
  static std::array<std::atomic<std::int64_t>, kMaxDevices> known{};
  const auto index = static_cast<std::size_t>(device.index());
  if (index >= kMaxDevices) {
    return false;
  }
  try {
    const std::int64_t now =
        c10::getDeviceAllocator(device.type())->getDeviceStats(device.index()).num_ooms;
    return known[index].exchange(now, std::memory_order_relaxed) < now;
  } catch (...) {
    return false;  // an allocator that counts nothing
  }
}

}  // namespace

bool is_fault_of_device(c10::Device device) noexcept {
  return !device.is_cpu() && (is_context_lost(device) || memory_ran_out(device));
}

std::string cuda_architecture(c10::Device device) {
  const CudaDriver* const driver = CudaDriver::get();
  int handle = 0;
  int major = 0;
  int minor = 0;
  int count = 0;
  const int ordinal = device.has_index() ? device.index() : 0;
  if (driver == nullptr || !find_device(*driver, ordinal, &handle) ||
      driver->device_get_attribute(&major, CudaDriver::kCapabilityMajor, handle) != 0 ||
      driver->device_get_attribute(&minor, CudaDriver::kCapabilityMinor, handle) != 0 ||
      driver->device_get_attribute(&count, CudaDriver::kMultiprocessorCount, handle) != 0) {
    return "none";
  }
  return "sm_" + std::to_string(major) + std::to_string(minor) + " " + std::to_string(count) +
         " multiprocessors";
}

int cuda_compute_mode(int device_index) {
  const CudaDriver* const driver = CudaDriver::get();
  int handle = 0;
  int mode = -1;
  if (driver == nullptr || !find_device(*driver, device_index, &handle) ||
      driver->device_get_attribute(&mode, CudaDriver::kComputeMode, handle) != 0) {
    return -1;
  }
  return mode;
}

bool is_capturing(c10::Device device) noexcept {
  if (device.is_cpu()) {
    return false;
  }
  const CudaDriver* const driver = CudaDriver::get();
  void* stream = nullptr;
  void* context = nullptr;
  int status = 0;
  if (driver == nullptr || !current_stream(device, &stream)) {
    return true;
  }
  if (stream == nullptr && driver->ctx_get_current(&context) == CudaDriver::kSuccess &&
      context == nullptr) {
    // A thread that has had nothing to do with the GPU yet, and the one stream that is never
    // captured.
    return false;
  }
  if (driver->stream_is_capturing(stream, &status) != CudaDriver::kSuccess) {
    return true;
  }
  return status != 0;
}

}  // namespace eagercache
