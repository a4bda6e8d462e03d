#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "dispatcher/kernels/loaded_kernel.h"
#include "dispatcher/kernels/model_container.h"
#include "kernel_cache/base/status.h"
#include "kernel_cache/loading/shared_library.h"

namespace eagercache {

// Gives `tensor` native's strides when its own differ from them in dimensions of size 1 only, which
// address nothing; leaves it alone otherwise.
void adopt_strides(at::Tensor& tensor, const std::vector<std::int64_t>& wanted);

// One operator call's kernel as a whole AOTInductor model container.
class ContainerKernel final : public LoadedKernel {
 public:
  // `device` tells where it runs ("cpu", "cuda:0"). kIncompatible when the library lacks the ABI,
  // when it has constants, or when its container cannot be made. Creates no CUDA context for CPU.
  static Result<std::unique_ptr<ContainerKernel>> create(const SharedLibrary& library,
                                                         c10::Device device);

  // The strides that native gives its outputs, as JSON ("[[4,1],[]]"); empty text for "as the
  // kernel gives them". Where an output of the kernel differs from them in dimensions of size 1
  // only, which address nothing, it gets native's. Call before the first run. kCorrupt for a
  // malformed text.
  Status set_output_strides(std::string_view text);
  void set_output_strides(std::vector<std::vector<std::int64_t>> strides) {
    output_strides_ = std::move(strides);
  }

  Outcome run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
              c10::Device device) noexcept override;
  std::size_t num_inputs() const noexcept override { return model_->num_inputs(); }
  std::size_t num_outputs() const noexcept override { return model_->num_outputs(); }

 private:
  Outcome run_with_handles(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
                           c10::Device device) noexcept;

  explicit ContainerKernel(std::unique_ptr<ModelContainer> model) : model_(std::move(model)) {}

  const std::unique_ptr<ModelContainer> model_;
  std::vector<std::vector<std::int64_t>> output_strides_;  // empty, or one per output
};

}  // namespace eagercache
