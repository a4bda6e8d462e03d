#include "dispatcher/plans/plan_fields.h"

#include <algorithm>
#include <array>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

namespace eagercache {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxDimensions = 16;

struct DtypeName {
  std::string_view name;
  c10::ScalarType dtype;
};

constexpr std::array kDtypes{
    DtypeName{"bool", c10::ScalarType::Bool},
    DtypeName{"uint8", c10::ScalarType::Byte},
    DtypeName{"int8", c10::ScalarType::Char},
    DtypeName{"int16", c10::ScalarType::Short},
    DtypeName{"int32", c10::ScalarType::Int},
    DtypeName{"int64", c10::ScalarType::Long},
    DtypeName{"float16", c10::ScalarType::Half},
    DtypeName{"bfloat16", c10::ScalarType::BFloat16},
    DtypeName{"float32", c10::ScalarType::Float},
    DtypeName{"float64", c10::ScalarType::Double},
    DtypeName{"complex64", c10::ScalarType::ComplexFloat},
    DtypeName{"complex128", c10::ScalarType::ComplexDouble},
};

// Whether the tensor holds something and all of it lies within kMaxPlanBytes of its first element.
bool fits(const LaunchPlan::Output& output) {
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < output.sizes.size(); ++i) {
    if (output.sizes[i] < 1) {
      return false;
    }
    std::uint64_t step = 0;
    if (__builtin_mul_overflow(static_cast<std::uint64_t>(output.sizes[i] - 1),
                               static_cast<std::uint64_t>(output.strides[i]), &step) ||
        __builtin_add_overflow(last, step, &last) || last > kMaxPlanBytes) {
      return false;
    }
  }
  return true;
}

}  // namespace

Status malformed_plan(std::string_view name, const char* what) {
  return {StatusCode::kCorrupt, "the manifest's " + std::string(name) + " is malformed: " + what};
}

bool has_fields(const json& value, std::initializer_list<const char*> names) {
  return value.is_object() && value.size() == names.size() &&
         std::all_of(names.begin(), names.end(),
                     [&](const char* name) { return value.contains(name); });
}

Result<json> read_plan(std::string_view text, std::string_view name, std::int64_t version,
                       std::initializer_list<const char*> fields) {
  json all = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!all.is_object() || !all.contains("version")) {
    return malformed_plan(name, "not a versioned object");
  }
  if (all["version"] != version) {
    return Status(StatusCode::kIncompatible, "the " + std::string(name) + " is of another version");
  }
  // Equal only without duplicate keys, spaces and other spellings of a value.
  if (all.dump(-1, ' ', false, json::error_handler_t::replace) != text) {
    return malformed_plan(name, "not canonical");
  }
  if (!has_fields(all, fields)) {
    return malformed_plan(name, "other fields");
  }
  return all;
}

std::optional<std::uint64_t> read_number(const json& value, std::uint64_t limit) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > limit) {
    return std::nullopt;
  }
  return value.get<std::uint64_t>();
}

std::optional<std::vector<std::int64_t>> read_numbers(const json& value, std::size_t max_count) {
  if (!value.is_array() || value.size() > max_count) {
    return std::nullopt;
  }
  std::vector<std::int64_t> numbers;
  for (const json& element : value) {
    const auto number = read_number(element, kMaxPlanBytes);
    if (!number) {
      return std::nullopt;
    }
    numbers.push_back(static_cast<std::int64_t>(*number));
  }
  return numbers;
}

std::optional<std::vector<std::size_t>> read_indices(const json& value, std::size_t limit) {
  const auto numbers = read_numbers(value, limit);
  if (!numbers) {
    return std::nullopt;
  }
  std::vector<std::size_t> indices(numbers->begin(), numbers->end());
  if (std::ranges::adjacent_find(indices, std::greater_equal<>()) != indices.end() ||
      (!indices.empty() && indices.back() >= limit)) {
    return std::nullopt;
  }
  return indices;
}

std::optional<LaunchPlan::Output> read_plan_output(const json& value) {
  if (!value.is_object() || value.size() != 3 || !value.contains("dtype") ||
      !value.contains("sizes") || !value.contains("strides") || !value["dtype"].is_string()) {
    return std::nullopt;
  }
  const auto dtype = dtype_by_name(value["dtype"].get_ref<const std::string&>());
  auto sizes = read_numbers(value["sizes"], kMaxDimensions);
  auto strides = read_numbers(value["strides"], kMaxDimensions);
  if (!dtype || !sizes || !strides || sizes->size() != strides->size()) {
    return std::nullopt;
  }
  LaunchPlan::Output output{*dtype, std::move(*sizes), std::move(*strides)};
  return fits(output) ? std::optional(std::move(output)) : std::nullopt;
}

std::optional<std::vector<LaunchPlan::Output>> read_plan_outputs(const json& value,
                                                                 std::size_t min_count,
                                                                 std::size_t max_count) {
  if (!value.is_array() || value.size() < min_count || value.size() > max_count) {
    return std::nullopt;
  }
  std::vector<LaunchPlan::Output> outputs;
  for (const json& element : value) {
    auto output = read_plan_output(element);
    if (!output) {
      return std::nullopt;
    }
    outputs.push_back(std::move(*output));
  }
  return outputs;
}

std::optional<std::vector<std::uint64_t>> read_scratch(const json& value, std::size_t max_count) {
  const auto numbers = read_numbers(value, max_count);
  if (!numbers || std::ranges::find(*numbers, 0) != numbers->end()) {
    return std::nullopt;
  }
  return std::vector<std::uint64_t>(numbers->begin(), numbers->end());
}

std::string_view dtype_name(c10::ScalarType dtype) noexcept {
  const auto* const known = std::find_if(kDtypes.begin(), kDtypes.end(),
                                         [&](const DtypeName& row) { return row.dtype == dtype; });
  return known == kDtypes.end() ? std::string_view() : known->name;
}

std::optional<c10::ScalarType> dtype_by_name(std::string_view name) noexcept {
  const auto* const known = std::find_if(kDtypes.begin(), kDtypes.end(),
                                         [&](const DtypeName& row) { return row.name == name; });
  return known == kDtypes.end() ? std::nullopt : std::optional(known->dtype);
}

}  // namespace eagercache
