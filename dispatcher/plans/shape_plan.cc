#include "dispatcher/plans/shape_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "dispatcher/plans/plan_fields.h"

namespace eagercache {
namespace {

using nlohmann::json;

constexpr std::uint64_t kShapePlanVersion = 1;
constexpr std::size_t kMaxNameLength = 128;
constexpr std::string_view kShapedEntryPrefix = "eagercache_kernel_";
constexpr std::string_view kShapePrefix = "eagercache_shape_";

constexpr std::string_view kShapePlanName = "shape plan";

Status malformed_shape_plan(const char* what) { return malformed_plan(kShapePlanName, what); }

bool is_number(const json& value, std::uint64_t limit) {
  return value.is_number_unsigned() && value.get<std::uint64_t>() <= limit;
}

bool is_name(const json& value, std::string_view prefix) {
  if (!value.is_string()) {
    return false;
  }
  const auto& name = value.get_ref<const std::string&>();
  return name.starts_with(prefix) && name.size() > prefix.size() && name.size() <= kMaxNameLength &&
         std::all_of(name.begin() + static_cast<std::ptrdiff_t>(prefix.size()), name.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

std::optional<c10::ScalarType> read_dtype(const json& value) {
  if (!value.is_string()) {
    return std::nullopt;
  }
  // What the key builder lets through.
  for (int number = 0; number <= static_cast<int>(c10::ScalarType::BFloat16); ++number) {
    const auto dtype = static_cast<c10::ScalarType>(number);
    if (dtype != c10::ScalarType::ComplexHalf && !c10::isQIntType(dtype) &&
        scalar_type_name(static_cast<std::uint8_t>(number)) ==
            value.get_ref<const std::string&>()) {
      return dtype;
    }
  }
  return std::nullopt;
}

bool read_outputs(const json& value, std::vector<ShapePlan::Output>* outputs) {
  if (!value.is_array() || value.empty() || value.size() > ShapePlan::kMaxOutputs) {
    return false;
  }
  for (const json& element : value) {
    if (!element.is_object() || element.size() != 2 || !element.contains("dtype") ||
        !element.contains("rank") || !is_number(element["rank"], ShapePlan::kMaxRank)) {
      return false;
    }
    const auto dtype = read_dtype(element["dtype"]);
    if (!dtype) {
      return false;
    }
    outputs->push_back({*dtype, element["rank"].get<std::size_t>()});
  }
  return true;
}

}  // namespace

std::size_t ShapePlan::count_numbers() const noexcept {
  std::size_t count = num_scratch + 1;
  for (const Output& output : outputs) {
    count += 2 * output.rank;
  }
  return count;
}

Result<ShapePlan> parse_shape_plan(std::string_view text) {
  const Result<json> read =
      read_plan(text, kShapePlanName, kShapePlanVersion,
                {"choice", "entry", "inputs", "outputs", "pattern", "scratch", "shape", "version"});
  if (!read) {
    return read.status();
  }
  const json& all = read.value();
  ShapePlan plan;
  if (!is_name(all["entry"], kShapedEntryPrefix) || !is_name(all["shape"], kShapePrefix)) {
    return malformed_shape_plan("the functions' names");
  }
  plan.entry = all["entry"].get<std::string>();
  plan.shape = all["shape"].get<std::string>();
  if (!is_number(all["inputs"], ShapePlan::kMaxInputs) ||
      !is_number(all["scratch"], ShapePlan::kMaxScratch)) {
    return malformed_shape_plan("inputs or scratch");
  }
  plan.num_inputs = all["inputs"].get<std::size_t>();
  plan.num_scratch = all["scratch"].get<std::size_t>();
  if (!read_outputs(all["outputs"], &plan.outputs)) {
    return malformed_shape_plan("outputs");
  }
  if (plan.count_numbers() > ShapePlan::kMaxNumbers) {
    return malformed_shape_plan("too many numbers");
  }
  auto pattern = read_pattern(all["pattern"], plan.num_inputs);
  if (!pattern) {
    return malformed_shape_plan("the pattern");
  }
  plan.pattern = std::move(*pattern);
  auto choice = read_choice(all["choice"]);
  if (!choice) {
    return malformed_shape_plan("the choice");
  }
  plan.choice = std::move(*choice);
  return plan;
}

}  // namespace eagercache
