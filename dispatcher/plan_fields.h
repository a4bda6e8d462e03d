#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "dispatcher/launch_plan.h"

namespace eagercache {

// What the launch plans of all devices have in common. Nothing in a plan's text is trusted.

// No tensor or buffer of a plan is larger, and no number in it.
inline constexpr std::uint64_t kMaxPlanBytes = std::uint64_t{1} << 40;

// A whole number from 0 to `limit`.
std::optional<std::uint64_t> read_number(const nlohmann::json& value, std::uint64_t limit);

// At most `max_count` whole numbers up to kMaxPlanBytes.
std::optional<std::vector<std::int64_t>> read_numbers(const nlohmann::json& value,
                                                      std::size_t max_count);

// Ascending indices below `limit`, each once.
std::optional<std::vector<std::size_t>> read_indices(const nlohmann::json& value,
                                                     std::size_t limit);

// {"dtype": ..., "sizes": [...], "strides": [...]}: a tensor that holds something and lies within
// kMaxPlanBytes of its first element.
std::optional<LaunchPlan::Output> read_plan_output(const nlohmann::json& value);

}  // namespace eagercache
