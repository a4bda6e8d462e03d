#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "dispatcher/device/cuda_launcher.h"
#include "dispatcher/kernels/shape_kernel.h"
#include "dispatcher/plans/cuda_shape_plan.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// Generated CUDA kernels that take sizes as arguments: grids, memory and arguments are computed for
// each call. Like a CudaKernel in everything else.
class CudaShapeKernel final : public ShapeKernel {
 public:
  // As CudaKernel::create.
  static Result<std::unique_ptr<CudaShapeKernel>> create(c10::Device device, CudaShapePlan plan,
                                                         std::span<const std::string> objects);

  Admission admits(std::span<const Word> words) const noexcept override;
  const ShapePattern& pattern() const noexcept override { return plan_.pattern; }

  // kNotStarted for inputs that the guards do not admit; other than of a matching call they must
  // not be.
  Outcome run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
              c10::Device device) noexcept override;
  std::size_t num_inputs() const noexcept override { return plan_.num_inputs; }
  std::size_t num_outputs() const noexcept override { return plan_.outputs.size(); }

 private:
  CudaShapeKernel(c10::Device device, CudaShapePlan plan, CudaLauncher launcher);

  const c10::Device device_;
  const CudaShapePlan plan_;
  const CudaLauncher launcher_;
};

}  // namespace eagercache
