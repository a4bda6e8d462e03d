#include "dispatcher/launch_plan.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

namespace eagercache {
namespace {

using nlohmann::json;

constexpr std::int64_t kVersion = 1;
constexpr std::size_t kMaxDimensions = 16;
constexpr std::size_t kMaxEntryLength = 128;
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 40;
constexpr std::string_view kEntryPrefix = "eagercache_kernel_";

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

Status malformed(const char* what) {
  return {StatusCode::kCorrupt, std::string("the manifest's launch plan is malformed: ") + what};
}

// A whole number from 0 to `limit`.
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
    const auto number = read_number(element, kMaxBytes);
    if (!number) {
      return std::nullopt;
    }
    numbers.push_back(static_cast<std::int64_t>(*number));
  }
  return numbers;
}

// Whether the tensor holds something and all of it lies within kMaxBytes of its first element.
bool fits(const LaunchPlan::Output& output) {
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < output.sizes.size(); ++i) {
    if (output.sizes[i] < 1) {
      return false;
    }
    std::uint64_t step = 0;
    if (__builtin_mul_overflow(static_cast<std::uint64_t>(output.sizes[i] - 1),
                               static_cast<std::uint64_t>(output.strides[i]), &step) ||
        __builtin_add_overflow(last, step, &last) || last > kMaxBytes) {
      return false;
    }
  }
  return true;
}

std::optional<LaunchPlan::Output> read_output(const json& value) {
  if (!value.is_object() || value.size() != 3 || !value.contains("dtype") ||
      !value.contains("sizes") || !value.contains("strides") || !value["dtype"].is_string()) {
    return std::nullopt;
  }
  const auto& name = value["dtype"].get_ref<const std::string&>();
  const auto* const dtype = std::find_if(
      kDtypes.begin(), kDtypes.end(), [&](const DtypeName& known) { return known.name == name; });
  auto sizes = read_numbers(value["sizes"], kMaxDimensions);
  auto strides = read_numbers(value["strides"], kMaxDimensions);
  if (dtype == kDtypes.end() || !sizes || !strides || sizes->size() != strides->size()) {
    return std::nullopt;
  }
  LaunchPlan::Output output{dtype->dtype, std::move(*sizes), std::move(*strides)};
  return fits(output) ? std::optional(std::move(output)) : std::nullopt;
}

bool is_entry_name(const std::string& name) {
  return name.starts_with(kEntryPrefix) && name.size() > kEntryPrefix.size() &&
         name.size() <= kMaxEntryLength &&
         std::all_of(name.begin() + kEntryPrefix.size(), name.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

}  // namespace

Result<LaunchPlan> parse_launch_plan(std::string_view text) {
  const json all = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!all.is_object() || !all.contains("version")) {
    return malformed("not a versioned object");
  }
  if (all["version"] != kVersion) {
    return Status(StatusCode::kIncompatible, "the launch plan is of another version");
  }
  // Equal only without duplicate keys, spaces and other spellings of a value.
  if (all.dump(-1, ' ', false, json::error_handler_t::replace) != text) {
    return malformed("not canonical");
  }
  if (all.size() != 5 || !all.contains("entry") || !all.contains("inputs") ||
      !all.contains("outputs") || !all.contains("scratch")) {
    return malformed("other fields");
  }
  LaunchPlan plan;
  const auto inputs = read_number(all["inputs"], LaunchPlan::kMaxInputs);
  if (!inputs || !all["entry"].is_string() || !is_entry_name(all["entry"].get<std::string>())) {
    return malformed("inputs or entry");
  }
  plan.num_inputs = *inputs;
  plan.entry = all["entry"].get<std::string>();
  const json& outputs = all["outputs"];
  if (!outputs.is_array() || outputs.empty() || outputs.size() > LaunchPlan::kMaxOutputs) {
    return malformed("outputs");
  }
  for (const json& element : outputs) {
    auto output = read_output(element);
    if (!output) {
      return malformed("an output");
    }
    plan.outputs.push_back(std::move(*output));
  }
  const auto scratch = read_numbers(all["scratch"], LaunchPlan::kMaxScratch);
  if (!scratch || std::find(scratch->begin(), scratch->end(), 0) != scratch->end()) {
    return malformed("scratch");
  }
  plan.scratch.assign(scratch->begin(), scratch->end());
  return plan;
}

}  // namespace eagercache
