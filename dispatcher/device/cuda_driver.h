#pragma once

#include <c10/core/Device.h>

#include <string>

namespace eagercache {

// The functions of NVIDIA's driver that kernels are loaded and launched with, found in libcuda.so.1
// at run time: nothing of CUDA is linked or included, so that the library loads where there is no
// driver. Types and numbers are those of the CUDA driver API reference, whose ABI does not change.
struct CudaDriver {
  using Result = int;
  static constexpr Result kSuccess = 0;
  static constexpr Result kOutOfMemory = 2;

  enum Attribute : int {
    kMultiprocessorCount = 16,
    kComputeMode = 20,
    kCapabilityMajor = 75,
    kCapabilityMinor = 76,
  };
  static constexpr int kMaxDynamicSharedSize = 8;  // CUfunction_attribute
  static constexpr unsigned kPlainSharedBytes = 48 * 1024;
  static constexpr int kRelaxedCapture = 2;  // CUstreamCaptureMode

  Result (*init)(unsigned flags);
  Result (*module_load_data)(void** module, const void* image);
  Result (*module_unload)(void* module);
  Result (*module_get_function)(void** function, void* module, const char* name);
  Result (*func_set_attribute)(void* function, int attribute, int value);
  Result (*func_load)(void* function);  // nullptr before CUDA 12.4
  Result (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, void* stream, void** parameters, void** extra);
  Result (*ctx_get_current)(void** context);
  Result (*ctx_set_current)(void* context);
  Result (*device_get)(int* device, int ordinal);
  Result (*device_get_attribute)(int* value, int attribute, int device);
  Result (*primary_ctx_retain)(void** context, int device);
  Result (*stream_is_capturing)(void* stream, int* status);
  Result (*exchange_capture_mode)(int* mode);
  Result (*get_error_string)(Result error, const char** text);

  // nullptr when there is no driver, or one that lacks a function. Never throws.
  static const CudaDriver* get() noexcept;

  std::string describe(Result error) const;
};

// While it lives, this thread may load code and allocate memory though another thread captures a
// graph: that neither fails nor breaks the other's capture. Nothing where there is no driver. Not
// for a thread that captures itself.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept;
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const CudaDriver* const driver_;
  int mode_ = CudaDriver::kRelaxedCapture;  // of the thread outside of the block, once exchanged
};

// Whether `error` has made the context unusable, so that every later call fails too. Such an error
// belongs to work that was launched before it was seen.
bool is_sticky_cuda_error(CudaDriver::Result error) noexcept;

// Whether what failed on `device` just now is no fault of the code that ran: an earlier error has
// made its context unusable, which native reports to its caller, or torch's allocator has run out
// of memory since it was last asked here. May be called under a capture. False for CPU.
bool is_fault_of_device(c10::Device device) noexcept;

// Architecture and size of the GPU ("sm_90 132 multiprocessors"), which generated code and its
// tuning depend on; "none" where the driver cannot say. Creates no context.
std::string cuda_architecture(c10::Device device);

// The GPU's compute mode (CUcomputemode: 0 lets any number of processes use it); -1 where the
// driver cannot say. Creates no context.
int cuda_compute_mode(int device_index);

// Whether the current stream of `device` is being captured into a graph; true also where that
// cannot be known. False for CPU.
bool is_capturing(c10::Device device) noexcept;

}  // namespace eagercache
