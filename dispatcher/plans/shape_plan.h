#pragma once

// Plain data, made from a manifest's text when its kernel is loaded, and owned by the kernel.

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dispatcher/plans/admitted_calls.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// How to launch a kernel with symbolic sizes. Its library has two functions, and `symbols` are the
// values of the pattern's:
//   std::int32_t entry(void* const* pointers, const std::int64_t* symbols)  0 for success; the
//       pointers are those of a LaunchPlan
//   std::int32_t shape(const std::int64_t* symbols, std::int64_t* numbers)  0 when the kernel's
//       guards admit the symbols; then `numbers` are the sizes and strides of each output, the
//       bytes of each scratch buffer, and the elements of the call's largest tensor
struct ShapePlan : AdmittedCalls {
  struct Output {
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    std::size_t rank = 0;
  };

  std::string entry;
  std::string shape;
  std::size_t num_inputs = 0;
  std::vector<Output> outputs;
  std::size_t num_scratch = 0;

  // How many numbers `shape` writes.
  std::size_t count_numbers() const noexcept;
};

// The plan that a manifest's text stands for. kCorrupt for anything but canonical JSON (sorted
// keys, no spaces) of exactly the known fields, with every number in range; kIncompatible for
// another version.
Result<ShapePlan> parse_shape_plan(std::string_view text);

}  // namespace eagercache
