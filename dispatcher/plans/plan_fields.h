#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "dispatcher/plans/launch_plan.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// What the launch plans of all devices have in common. Nothing in a plan's text is trusted.

// No tensor or buffer of a plan is larger, and no number in it.
inline constexpr std::uint64_t kMaxPlanBytes = std::uint64_t{1} << 40;

// The status of a plan, called `name`, whose text is not what it should be.
Status malformed_plan(std::string_view name, const char* what);

// Whether `value` is an object of exactly these fields.
bool has_fields(const nlohmann::json& value, std::initializer_list<const char*> names);

// A plan's text as an object of exactly `fields`, "version" among them. kCorrupt for anything but
// canonical JSON (sorted keys, no spaces); kIncompatible for another version.
Result<nlohmann::json> read_plan(std::string_view text, std::string_view name, std::int64_t version,
                                 std::initializer_list<const char*> fields);

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

// At most `max_count` of these, and at least `min_count`.
std::optional<std::vector<LaunchPlan::Output>> read_plan_outputs(const nlohmann::json& value,
                                                                 std::size_t min_count,
                                                                 std::size_t max_count);

// The bytes of each buffer that a kernel needs besides, at most `max_count`, none of them empty.
std::optional<std::vector<std::uint64_t>> read_scratch(const nlohmann::json& value,
                                                       std::size_t max_count);

// The name by which plans call a dtype; empty for one that they do not know.
std::string_view dtype_name(c10::ScalarType dtype) noexcept;

// The dtype that plans call so.
std::optional<c10::ScalarType> dtype_by_name(std::string_view name) noexcept;

}  // namespace eagercache
