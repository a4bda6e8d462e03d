#pragma once

// Plain data, made from a manifest's text when its kernel is loaded, and owned by the kernel.

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_cache/base/status.h"

namespace eagercache {

// How to launch a bare kernel: what the hook allocates, and the function that it then calls with
// one array of pointers: the call's tensors in argument order, the outputs, the scratch buffers.
// What a call returns of its own arguments is no output.
struct LaunchPlan {
  struct Output {
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
  };

  static constexpr std::size_t kMaxInputs = 1024;
  static constexpr std::size_t kMaxOutputs = 1024;
  static constexpr std::size_t kMaxScratch = 1024;

  // The function's symbol: std::int32_t(void* const*); 0 for success, 2 when it left the call to
  // native before it did anything.
  std::string entry;
  std::size_t num_inputs = 0;
  std::vector<std::size_t> writes;     // the inputs that the function writes; ascending
  std::vector<Output> outputs;         // none only where it writes
  std::vector<std::uint64_t> scratch;  // bytes of each buffer
};

// The plan that a manifest's text stands for. kCorrupt for anything but canonical JSON (sorted
// keys, no spaces) of exactly the known fields, with every number in range; kIncompatible for
// another version.
Result<LaunchPlan> parse_launch_plan(std::string_view text);

// A launch plan whose function takes numbers of the call, too: std::int32_t(void* const*, const
// double*). They are those that scalar_class() leaves out of the call's key, in its order.
struct ScalarPlan {
  LaunchPlan plan;
  std::size_t num_scalars = 0;  // 1 to kMaxScalars
};

// As parse_launch_plan, of {"plan": <a launch plan>, "scalars": number, "version": 1}.
Result<ScalarPlan> parse_scalar_plan(std::string_view text);

}  // namespace eagercache
