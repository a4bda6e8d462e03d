#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "dispatcher/kernels/loaded_kernel.h"
#include "dispatcher/memory/output_allocation.h"
#include "dispatcher/plans/launch_plan.h"
#include "kernel_cache/base/status.h"
#include "kernel_cache/loading/shared_library.h"

namespace eagercache {

// What the C function of a compiled kernel returned: 2 before it did anything, for an index that is
// out of its range.
inline LoadedKernel::Outcome outcome_of_entry(std::int32_t returned) noexcept {
  switch (returned) {
    case 0:
      return LoadedKernel::Outcome::kAnswered;
    case 2:
      return LoadedKernel::Outcome::kNotStarted;
    default:
      return LoadedKernel::Outcome::kFailed;
  }
}

// Generated kernel functions on CPU, launched by a plan: the outputs are allocated here, as native
// would, and one function gets all pointers. Keeps no state between runs; a first run is like any
// other. Several kernels may live in one library.
class BareKernel final : public ScalarKernel {
 public:
  // kIncompatible when the library lacks the plan's entry or the plan is not for CPU. The entry of
  // a kernel that takes `num_scalars` numbers gets their address as its second argument.
  static Result<std::unique_ptr<BareKernel>> create(const SharedLibrary& library,
                                                    c10::Device device, LaunchPlan plan,
                                                    std::size_t num_scalars = 0);

  Outcome run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
              c10::Device device) noexcept override;
  std::size_t num_inputs() const noexcept override { return num_inputs_; }
  std::size_t num_outputs() const noexcept override { return outputs_.size(); }
  bool writes_inputs() const noexcept override { return !writes_.empty(); }
  std::size_t num_scalars() const noexcept override { return num_scalars_; }

 private:
  using Entry = std::int32_t (*)(void* const* pointers);
  using ScalarEntry = std::int32_t (*)(void* const* pointers, const double* scalars);

  BareKernel(LaunchPlan plan, Entry entry, ScalarEntry scalar_entry, std::size_t num_scalars);

  Outcome run_with(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
                   c10::Device device, std::span<const double> scalars) noexcept override;

  // run() with `call` in the place of the entry.
  template <typename Call>
  Outcome launch(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
                 const Call& call) noexcept;

  // Fills `outputs` and all pointers but the scratch's.
  void** prepare(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
                 void** pointers) const;

  const Entry entry_;
  const ScalarEntry scalar_entry_;  // null for a kernel without numbers
  const std::size_t num_scalars_;
  const std::size_t num_inputs_;
  const std::vector<std::size_t> writes_;  // of the inputs
  std::vector<OutputSpec> outputs_;
  std::vector<std::size_t> scratch_offsets_;  // into one allocation
  std::size_t scratch_bytes_ = 0;
};

}  // namespace eagercache
