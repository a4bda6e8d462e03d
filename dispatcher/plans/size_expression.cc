#include "dispatcher/plans/size_expression.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

namespace eagercache {

std::optional<SizeExpression::Step> SizeExpression::read_step(const nlohmann::json& value,
                                                              std::size_t num_sizes) {
  static constexpr std::array<std::pair<std::string_view, Kind>, 13> kOperators{{
      {"+", Kind::kAdd},
      {"-", Kind::kSubtract},
      {"*", Kind::kMultiply},
      {"//", Kind::kDivide},
      {"%", Kind::kRemainder},
      {"max", Kind::kMaximum},
      {"min", Kind::kMinimum},
      {"==", Kind::kEqual},
      {"!=", Kind::kNotEqual},
      {"<", Kind::kLess},
      {"<=", Kind::kAtMost},
      {"and", Kind::kAnd},
      {"or", Kind::kOr},
  }};
  if (value.is_number_integer()) {
    const bool fits = !value.is_number_unsigned() ||
                      value.get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max();
    return fits ? std::optional(Step{Kind::kConstant, value.get<std::int64_t>()}) : std::nullopt;
  }
  if (!value.is_string()) {
    return std::nullopt;
  }
  const std::string_view word = value.get_ref<const std::string&>();
  const auto found = std::ranges::find(kOperators, word, [](const auto& row) { return row.first; });
  if (found != kOperators.end()) {
    return Step{found->second, 0};
  }
  std::size_t size = 0;
  const char* const end = word.data() + word.size();
  if (word.size() < 2 || word[0] != 's' ||
      std::from_chars(word.data() + 1, end, size) != std::from_chars_result{end, std::errc()} ||
      size >= num_sizes) {
    return std::nullopt;
  }
  return Step{Kind::kSize, static_cast<std::int64_t>(size)};
}

std::optional<SizeExpression> SizeExpression::read(const nlohmann::json& value,
                                                   std::size_t num_sizes) {
  if (!value.is_array() || value.empty() || value.size() > kMaxSteps) {
    return std::nullopt;
  }
  SizeExpression expression;
  std::size_t depth = 0;
  for (const nlohmann::json& element : value) {
    const std::optional<Step> step = read_step(element, num_sizes);
    if (!step) {
      return std::nullopt;
    }
    const bool pushes = step->kind == Kind::kConstant || step->kind == Kind::kSize;
    if (pushes ? depth == kMaxDepth : depth < 2) {
      return std::nullopt;
    }
    depth = pushes ? depth + 1 : depth - 1;
    expression.steps_.push_back(*step);
  }
  return depth == 1 ? std::optional(std::move(expression)) : std::nullopt;
}

bool SizeExpression::apply(Kind kind, std::int64_t a, std::int64_t b,
                           std::int64_t* result) noexcept {
  const auto divides = [&] {
    return b != 0 && !(a == std::numeric_limits<std::int64_t>::min() && b == -1);
  };
  switch (kind) {
    case Kind::kAdd:
      return !__builtin_add_overflow(a, b, result);
    case Kind::kSubtract:
      return !__builtin_sub_overflow(a, b, result);
    case Kind::kMultiply:
      return !__builtin_mul_overflow(a, b, result);
    case Kind::kDivide:
      if (!divides()) return false;
      *result = a / b - static_cast<std::int64_t>(a % b != 0 && (a < 0) != (b < 0));
      return true;
    case Kind::kRemainder:
      if (!divides()) return false;
      *result = a % b;
      if (*result != 0 && (*result < 0) != (b < 0)) *result += b;
      return true;
    case Kind::kMaximum:
      *result = std::max(a, b);
      return true;
    case Kind::kMinimum:
      *result = std::min(a, b);
      return true;
    case Kind::kEqual:
      *result = static_cast<std::int64_t>(a == b);
      return true;
    case Kind::kNotEqual:
      *result = static_cast<std::int64_t>(a != b);
      return true;
    case Kind::kLess:
      *result = static_cast<std::int64_t>(a < b);
      return true;
    case Kind::kAtMost:
      *result = static_cast<std::int64_t>(a <= b);
      return true;
    case Kind::kAnd:
      *result = static_cast<std::int64_t>(a != 0 && b != 0);
      return true;
    case Kind::kOr:
      *result = static_cast<std::int64_t>(a != 0 || b != 0);
      return true;
    default:
      return false;
  }
}

std::optional<std::int64_t> SizeExpression::evaluate(
    std::span<const std::int64_t> sizes) const noexcept {
  std::array<std::int64_t, kMaxDepth> stack;  // uninitialised: on the path of a hit
  std::size_t depth = 0;
  for (const Step& step : steps_) {
    if (step.kind == Kind::kConstant) {
      stack[depth++] = step.value;
    } else if (step.kind == Kind::kSize) {
      stack[depth++] = sizes[static_cast<std::size_t>(step.value)];
    } else {
      --depth;
      if (!apply(step.kind, stack[depth - 1], stack[depth], &stack[depth - 1])) [[unlikely]] {
        return std::nullopt;
      }
    }
  }
  return stack[0];
}

}  // namespace eagercache
