#include "dispatcher/plans/shape_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
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

// Whether `value` is an array of arrays of `width` numbers that fit 32 bits.
bool is_table(const json& value, std::size_t width, std::size_t max_rows) {
  return value.is_array() && value.size() <= max_rows &&
         std::all_of(value.begin(), value.end(), [width](const json& row) {
           return row.is_array() && row.size() == width &&
                  std::all_of(row.begin(), row.end(), [](const json& number) {
                    return is_number(number, std::numeric_limits<std::uint32_t>::max());
                  });
         });
}

std::optional<ShapePattern> read_pattern(const json& value) {
  if (!value.is_object() || value.size() != 3 || !value.contains("symbols") ||
      !value.contains("ties") || !value.contains("words") || !value["words"].is_array() ||
      value["words"].size() > KeyBuffer::kCapacity ||
      !is_table(value["symbols"], 3, ShapePattern::kMaxSymbols) ||
      !is_table(value["ties"], 4, KeyBuffer::kCapacity)) {
    return std::nullopt;
  }
  ShapePattern pattern;
  for (const json& word : value["words"]) {
    if (!word.is_number_unsigned()) {
      return std::nullopt;
    }
    pattern.words.push_back(word.get<Word>());
  }
  for (const json& row : value["symbols"]) {
    pattern.symbols.push_back(
        {row[0].get<std::uint32_t>(), row[1].get<std::uint32_t>(), row[2].get<std::uint32_t>()});
  }
  for (const json& row : value["ties"]) {
    pattern.ties.push_back({row[0].get<std::uint32_t>(), row[1].get<std::uint32_t>(),
                            row[2].get<std::uint32_t>(), row[3].get<std::uint32_t>()});
  }
  return pattern.is_sound() ? std::optional(std::move(pattern)) : std::nullopt;
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

bool read_choice(const json& value, std::vector<ShapePlan::Measured>* choice) {
  if (!value.is_array() || value.empty() || value.size() > ShapePlan::kMaxMeasured) {
    return false;
  }
  std::int64_t last = 0;
  for (const json& row : value) {
    if (!row.is_array() || row.size() != 2 ||
        !is_number(row[0], std::numeric_limits<std::int32_t>::max()) || !row[1].is_boolean()) {
      return false;
    }
    const auto elements = row[0].get<std::int64_t>();
    if (elements <= last) {
      return false;
    }
    last = elements;
    choice->push_back({elements, row[1].get<bool>()});
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

bool ShapePlan::chooses_kernel(std::int64_t elements) const noexcept {
  const auto distance = [elements](const Measured& measured) {
    return std::abs(std::log2(static_cast<double>(measured.elements)) -
                    std::log2(static_cast<double>(std::max<std::int64_t>(elements, 1))));
  };
  return std::min_element(
             choice.begin(), choice.end(),
             [&](const Measured& a, const Measured& b) { return distance(a) < distance(b); })
      ->kernel;
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
  auto pattern = read_pattern(all["pattern"]);
  if (!pattern) {
    return malformed_shape_plan("the pattern");
  }
  plan.pattern = std::move(*pattern);
  for (const ShapePattern::Symbol& symbol : plan.pattern.symbols) {
    if (symbol.tensor >= plan.num_inputs) {
      return malformed_shape_plan("the pattern");
    }
  }
  if (!read_choice(all["choice"], &plan.choice)) {
    return malformed_shape_plan("the choice");
  }
  return plan;
}

json pattern_json(const ShapePattern& pattern) {
  json symbols = json::array();
  for (const ShapePattern::Symbol& symbol : pattern.symbols) {
    symbols.push_back({symbol.word, symbol.tensor, symbol.dimension});
  }
  json ties = json::array();
  for (const ShapePattern::Tie& tie : pattern.ties) {
    ties.push_back({tie.word, tie.symbol, tie.argument, tie.element});
  }
  return {{"symbols", std::move(symbols)}, {"ties", std::move(ties)}, {"words", pattern.words}};
}

}  // namespace eagercache
