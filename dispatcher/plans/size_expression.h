#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <vector>

namespace eagercache {

// A whole number that is computed from a call's open sizes: the steps of a stack machine, each of
// which pushes a constant or a size, or takes two values and pushes what they make. Plain data; any
// thread may evaluate it.
//
// As text it is a JSON array of its steps in order (postfix): whole numbers, the sizes "s0", "s1",
// ..., and the operators "+", "-", "*", "//" (rounds down), "%" (of the divisor's sign), "max",
// "min", "==", "!=", "<", "<=", "and", "or" (1 for true, 0 for false). worker/cuda/sizes.py writes
// it.
class SizeExpression {
 public:
  static constexpr std::size_t kMaxSteps = 256;
  static constexpr std::size_t kMaxDepth = 16;

  // Nothing for what is not one value of at most `num_sizes` sizes, or needs a deeper stack.
  static std::optional<SizeExpression> read(const nlohmann::json& value, std::size_t num_sizes);

  // Nothing where a step leaves 64 bits or divides by zero. `sizes` are as many as read() was told.
  std::optional<std::int64_t> evaluate(std::span<const std::int64_t> sizes) const noexcept;

 private:
  enum class Kind : std::uint8_t {
    kConstant,
    kSize,
    kAdd,
    kSubtract,
    kMultiply,
    kDivide,
    kRemainder,
    kMaximum,
    kMinimum,
    kEqual,
    kNotEqual,
    kLess,
    kAtMost,
    kAnd,
    kOr,
  };
  struct Step {
    Kind kind = Kind::kConstant;
    std::int64_t value = 0;  // the constant, or which size
  };

  static std::optional<Step> read_step(const nlohmann::json& value, std::size_t num_sizes);
  static bool apply(Kind kind, std::int64_t a, std::int64_t b, std::int64_t* result) noexcept;

  std::vector<Step> steps_;
};

}  // namespace eagercache
