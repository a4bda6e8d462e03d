#pragma once

// Plain data, made from a manifest's text when its kernel is loaded, and owned by the kernel.

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "dispatcher/plans/admitted_calls.h"
#include "dispatcher/plans/cuda_launch.h"
#include "dispatcher/plans/size_expression.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// How to launch CUDA kernels with symbolic sizes. What depends on the sizes of a call is in one
// list of `numbers`, which everything else names by index: each is computed once for a call, from
// the values of the pattern's symbols.
struct CudaShapePlan : AdmittedCalls {
  using Index = std::uint16_t;  // into `numbers`

  struct Output {
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    std::vector<Index> sizes;
    std::vector<Index> strides;  // as many
  };

  static constexpr std::size_t kMaxGuards = 64;

  std::size_t num_inputs = 0;
  std::vector<Output> outputs;  // never empty: kernels that write have fixed sizes
  std::vector<Index> scratch;   // bytes of each buffer
  std::vector<CudaLaunch> launches;
  std::size_t num_objects = 0;  // cubins that the launches name
  std::vector<SizeExpression> numbers;
  std::vector<SizeExpression> guards;  // each is not 0 where the kernel holds
  Index elements = 0;                  // of the call's largest tensor

  // Computes `values`, as many as `numbers`. False where the kernel does not hold for these values
  // of the symbols, or what it would allocate or launch is outside of what there may be.
  bool compute(std::span<const std::int64_t> symbols,
               std::span<std::int64_t> values) const noexcept;
};

// The plan that a manifest's text stands for. kCorrupt for anything but canonical JSON (sorted
// keys, no spaces) of exactly the known fields, with every number in range; kIncompatible for
// another version.
Result<CudaShapePlan> parse_cuda_shape_plan(std::string_view text);

}  // namespace eagercache
