#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/plans/cuda_launch.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// The functions of a kernel's cubins, loaded on one device, and their launches on a stream of it.
// Keeps no state between launches, which any number of threads may make.
class CudaLauncher {
 public:
  enum class Outcome : std::uint8_t {
    kLaunched,
    kNotStarted,  // nothing was launched, through no fault of the kernel's
    kFailed,      // some may have been
  };

  // Loads `objects`, the cubins that `launches` name, on a device of CUDA whose primary context
  // must exist. Relaxed for captures under way in other threads; must not be called under a capture
  // of this one. kIncompatible when there is no driver, when the code is for another GPU, or when a
  // function is missing; kCorrupt for another number of objects.
  static Result<CudaLauncher> load(c10::Device device, std::span<const std::string> objects,
                                   std::span<const CudaLaunch> launches);

  // What the arguments of a call's launches are made of.
  struct Passed {
    std::span<const at::Tensor* const> inputs;
    void* const* pointers = nullptr;          // numbered as a plan's
    std::span<const std::int64_t> numbers{};  // of a plan with open sizes, empty for others
    std::span<const double> scalars{};        // of the call, where the plan takes any
  };

  // Makes `launches`, those that were loaded, on `stream`. `writes`: an input is written.
  Outcome run(std::span<const CudaLaunch> launches, const Passed& passed, bool writes,
              void* stream) const noexcept;

 private:
  CudaLauncher(const CudaDriver& driver, void* context) : driver_(&driver), context_(context) {}
  Status load_functions(std::span<const std::string> objects, std::span<const CudaLaunch> launches);

  const CudaDriver* driver_;
  void* context_;                 // the device's primary one; never released
  std::vector<void*> functions_;  // one a launch; the modules are never unloaded
};

// Of several buffers in one allocation, how far the next one is from one of so many bytes: what
// cudaMalloc promises of its memory, and vector loads of generated code rely on.
constexpr std::size_t padded_bytes(std::size_t bytes) noexcept {
  constexpr std::size_t kCudaAlignment = 256;
  return (bytes + kCudaAlignment - 1) / kCudaAlignment * kCudaAlignment;
}

}  // namespace eagercache
