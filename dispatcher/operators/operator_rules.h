#pragma once

// Operators that are not hooked, or whose calls are looked at, by name. Constant data; any thread.

#include <cstdint>
#include <optional>
#include <string_view>

namespace eagercache {

// What keeps kernels from an operator, or from some of its calls, besides its effects
// (operator_effects.h).
enum class RuleKind : std::uint8_t {
  kLibrary,          // a call into a math library whose precision state is not in the key
  kIntegerDivision,  // traps on a zero divisor when all operands are integral
  // On the CPU: trusts the positions that it is given, so that made-up ones end a compile worker.
  kTrustedPositions,
  // On every device: trusts positions of which each depends on its neighbours, and has no kernel of
  // its own that would be worth looking for some that fit.
  kChainedPositions,
};

struct OperatorRule {
  RuleKind kind;
  std::string_view reason;  // one clause for people
};

// The rule for an operator by its name without overload ("aten::mm"), if there is one; in-place and
// list forms have the plain form's. kIntegerDivision leaves it eligible; the others do not, where
// they apply.
std::optional<OperatorRule> find_operator_rule(std::string_view name) noexcept;

}  // namespace eagercache
