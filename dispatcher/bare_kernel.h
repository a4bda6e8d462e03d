#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "dispatcher/launch_plan.h"
#include "dispatcher/loaded_kernel.h"
#include "dispatcher/output_allocation.h"
#include "kernel_cache/shared_library.h"
#include "kernel_cache/status.h"

namespace eagercache {

// Generated kernel functions on CPU, launched by a plan: the outputs are allocated here, as native
// would, and one function gets all pointers. Keeps no state between runs; a first run is like any
// other. Several kernels may live in one library.
class BareKernel final : public LoadedKernel {
 public:
  // kIncompatible when the library lacks the plan's entry or the plan is not for CPU.
  static Result<std::unique_ptr<BareKernel>> create(const SharedLibrary& library,
                                                    c10::Device device, LaunchPlan plan);

  Outcome run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
              c10::Device device) noexcept override;
  std::size_t num_inputs() const noexcept override { return num_inputs_; }
  std::size_t num_outputs() const noexcept override { return outputs_.size(); }
  bool writes_inputs() const noexcept override { return !writes_.empty(); }

 private:
  using Entry = std::int32_t (*)(void* const* pointers);

  BareKernel(LaunchPlan plan, Entry entry);

  // Fills `outputs` and all pointers but the scratch's.
  void** prepare(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
                 void** pointers) const;

  const Entry entry_;
  const std::size_t num_inputs_;
  const std::vector<std::size_t> writes_;  // of the inputs
  std::vector<OutputSpec> outputs_;
  std::vector<std::size_t> scratch_offsets_;  // into one allocation
  std::size_t scratch_bytes_ = 0;
};

}  // namespace eagercache
