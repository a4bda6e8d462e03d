#include "dispatcher/plans/admitted_calls.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "dispatcher/plans/plan_fields.h"

namespace eagercache {
namespace {

using nlohmann::json;

// Whether `value` is an array of arrays of `width` numbers that fit 32 bits.
bool is_table(const json& value, std::size_t width, std::size_t max_rows) {
  return value.is_array() && value.size() <= max_rows &&
         std::all_of(value.begin(), value.end(), [width](const json& row) {
           return row.is_array() && row.size() == width &&
                  std::all_of(row.begin(), row.end(), [](const json& number) {
                    return read_number(number, std::numeric_limits<std::uint32_t>::max())
                        .has_value();
                  });
         });
}

}  // namespace

bool AdmittedCalls::chooses_kernel(std::int64_t elements) const noexcept {
  const auto distance = [elements](const Measured& measured) {
    return std::abs(std::log2(static_cast<double>(measured.elements)) -
                    std::log2(static_cast<double>(std::max<std::int64_t>(elements, 1))));
  };
  return std::min_element(
             choice.begin(), choice.end(),
             [&](const Measured& a, const Measured& b) { return distance(a) < distance(b); })
      ->kernel;
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

std::optional<ShapePattern> read_pattern(const json& value, std::size_t num_inputs) {
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
  const bool sound = pattern.is_sound() &&
                     std::ranges::all_of(pattern.symbols, [&](const ShapePattern::Symbol& symbol) {
                       return symbol.tensor < num_inputs;
                     });
  return sound ? std::optional(std::move(pattern)) : std::nullopt;
}

std::optional<std::vector<AdmittedCalls::Measured>> read_choice(const json& value) {
  if (!value.is_array() || value.empty() || value.size() > AdmittedCalls::kMaxMeasured) {
    return std::nullopt;
  }
  std::vector<AdmittedCalls::Measured> choice;
  std::int64_t last = 0;
  for (const json& row : value) {
    if (!row.is_array() || row.size() != 2 || !row[1].is_boolean()) {
      return std::nullopt;
    }
    const auto read = read_number(row[0], std::numeric_limits<std::int32_t>::max());
    const auto elements = static_cast<std::int64_t>(read.value_or(0));
    if (elements <= last) {
      return std::nullopt;
    }
    last = elements;
    choice.push_back({elements, row[1].get<bool>()});
  }
  return choice;
}

}  // namespace eagercache
