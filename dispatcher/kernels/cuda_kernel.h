#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dispatcher/device/cuda_launcher.h"
#include "dispatcher/kernels/loaded_kernel.h"
#include "dispatcher/plans/cuda_plan.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// Memory of a call on CUDA, from PyTorch's caching allocator.
at::Tensor allocate_cuda_output(c10::ScalarType dtype, c10::IntArrayRef sizes,
                                c10::IntArrayRef strides);
c10::DataPtr allocate_cuda_scratch(std::size_t bytes);
// What a launcher's outcome is of a kernel, whose outputs are filled once it has run.
LoadedKernel::Outcome outcome_of_launch(CudaLauncher::Outcome outcome) noexcept;

// Generated CUDA kernels, launched by a plan on the current stream of the device that they were
// loaded for: outputs and scratch come from PyTorch's caching allocator, then one cuLaunchKernel a
// kernel; no event, no synchronisation. Keeps no state between runs, so that runs may overlap on
// any number of threads and streams and be captured into graphs.
class CudaKernel final : public ScalarKernel {
 public:
  // Loads the plan's cubins (`objects`, in order) on `device`, whose primary context must exist.
  // Relaxed for captures under way in other threads; must not be called under a capture of this
  // one. kIncompatible when there is no driver, when the code is for another GPU, or when a
  // function is missing.
  static Result<std::unique_ptr<CudaKernel>> create(c10::Device device, CudaPlan plan,
                                                    std::span<const std::string> objects);

  // Kernels loaded in this process, those with symbolic sizes among them. Any thread.
  static std::size_t loaded_count() noexcept;
  static void count_loaded() noexcept;  // one more

  // A launch that fails because an earlier kernel broke the context is not this kernel's failure:
  // kNotStarted, and native reports the error. So is memory that runs out.
  Outcome run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
              c10::Device device) noexcept override;
  std::size_t num_inputs() const noexcept override { return plan_.num_inputs; }
  std::size_t num_outputs() const noexcept override { return plan_.outputs.size(); }
  bool writes_inputs() const noexcept override { return !plan_.writes.empty(); }
  std::size_t num_scalars() const noexcept override { return plan_.num_scalars; }

 private:
  Outcome run_with(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
                   c10::Device device, std::span<const double> scalars) noexcept override;
  CudaKernel(c10::Device device, CudaPlan plan, CudaLauncher launcher);

  const c10::Device device_;
  const CudaPlan plan_;
  const CudaLauncher launcher_;
  std::vector<std::size_t> scratch_offsets_;  // into one allocation
  std::size_t scratch_bytes_ = 0;
};

}  // namespace eagercache
