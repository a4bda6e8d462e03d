#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace eagercache {

// What a schema does not say about an operator, or says wrongly.
enum class RuleKind : std::uint8_t {
  kUnmarkedWrite,        // writes an argument without marking it (running statistics)
  kUnmarkedAlias,        // returns a view without marking it
  kOpaqueOutput,         // hands on state that only its own backward understands
  kUnspecifiedContents,  // the output's values mean nothing (empty and friends)
  kLibrary,              // a call into a math library whose precision state is not in the key
  kIntegerDivision,      // traps on a zero divisor when all operands are integral
};

struct OperatorRule {
  RuleKind kind;
  std::string_view reason;  // one clause for people
};

// The rule for an operator by its name without overload ("aten::native_batch_norm"), if there is
// one. kIntegerDivision leaves the operator eligible; every other kind does not.
std::optional<OperatorRule> find_operator_rule(std::string_view name) noexcept;

}  // namespace eagercache
