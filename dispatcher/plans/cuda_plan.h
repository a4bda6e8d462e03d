#pragma once

// Plain data, made from a manifest's text when its kernel is loaded, and owned by the kernel.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "dispatcher/plans/cuda_launch.h"
#include "dispatcher/plans/launch_plan.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// How to launch the kernels of one call on CUDA: what the hook allocates, and the launches in
// order.
struct CudaPlan {
  static constexpr std::size_t kMaxInputs = 1024;  // as many as a call may have
  static constexpr std::size_t kMaxOutputs = 1024;
  static constexpr std::size_t kMaxScratch = 1024;
  static constexpr std::size_t kMaxPointers = kMaxInputs + kMaxOutputs + kMaxScratch;

  std::size_t num_inputs = 0;
  std::vector<std::size_t> writes;          // the inputs that are written; ascending
  std::vector<LaunchPlan::Output> outputs;  // none only where it writes
  std::vector<std::uint64_t> scratch;       // bytes of each buffer
  std::vector<CudaLaunch> launches;
  std::size_t num_objects = 0;  // cubins that the launches name
  std::size_t num_scalars = 0;  // numbers of the call that the launches take; up to kMaxScalars
};

// The plan that a manifest's text stands for. kCorrupt for anything but canonical JSON (sorted
// keys, no spaces) of exactly the known fields, with every number in range; kIncompatible for
// another version.
Result<CudaPlan> parse_cuda_plan(std::string_view text);

// As parse_cuda_plan, of {"plan": <such a plan>, "scalars": number, "version": 1}: its launches
// take the numbers that scalar_class() leaves out of the call's key, in its order.
Result<CudaPlan> parse_cuda_scalar_plan(std::string_view text);

}  // namespace eagercache
