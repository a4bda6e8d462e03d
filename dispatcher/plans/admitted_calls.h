#pragma once

// Plain data, made from a manifest's text when its kernel is loaded, and owned by the kernel.

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "guards/key/shape_class.h"

namespace eagercache {

// Which calls of a shape class a kernel with symbolic sizes is for.
struct AdmittedCalls {
  // Whether the kernel was measured to be faster than native on a call whose largest tensor has
  // `elements`.
  struct Measured {
    std::int64_t elements = 0;
    bool kernel = false;
  };
  static constexpr std::size_t kMaxMeasured = 64;
  // Of a plan with open sizes, on whatever device.
  static constexpr std::size_t kMaxInputs = 64;
  static constexpr std::size_t kMaxOutputs = 16;
  static constexpr std::size_t kMaxScratch = 32;
  static constexpr std::size_t kMaxPointers = kMaxInputs + kMaxOutputs + kMaxScratch;
  static constexpr std::size_t kMaxRank = 16;
  static constexpr std::size_t kMaxNumbers = 256;

  ShapePattern pattern;
  std::vector<Measured> choice;  // by ascending elements, each once; never empty

  // Whether the kernel is to answer a call of so many elements: as at the nearest measured size,
  // by the ratio of the sizes.
  bool chooses_kernel(std::int64_t elements) const noexcept;
};

// The pattern as the plan and compile requests hold it:
//   {"symbols": [[word, tensor, dimension], ...], "ties": [[word, symbol, argument, element], ...],
//    "words": [...]}
nlohmann::json pattern_json(const ShapePattern& pattern);
// Nothing for what is no sound pattern of a call of `num_inputs` tensors.
std::optional<ShapePattern> read_pattern(const nlohmann::json& value, std::size_t num_inputs);

// [[elements, whether the kernel], ...].
std::optional<std::vector<AdmittedCalls::Measured>> read_choice(const nlohmann::json& value);

}  // namespace eagercache
