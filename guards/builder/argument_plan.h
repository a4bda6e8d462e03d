#pragma once

// What is known of an operator's arguments before it is called. Made when the operator is hooked,
// and owned by its hook; then never changed, so that any thread reads it without a lock.

#include <ATen/core/function_schema.h>

#include <cstdint>
#include <string>
#include <vector>

namespace eagercache {

// How one schema argument is read from the stack. Optionals need no kind of their own: None is
// tested first for every argument.
enum class ArgumentReader : std::uint8_t {
  kTensor,      // Tensor, Tensor?
  kTensorList,  // Tensor[], Tensor?[]
  kInt,         // int, SymInt
  kFloat,
  kBool,
  kScalar,  // Scalar: int, float, bool or complex by the value's own tag
  kString,
  kIntList,  // int[], SymInt[]
  kFloatList,
  kBoolList,
  kScalarList,
  kScalarType,
  kLayout,
  kMemoryFormat,
  kDevice,
};

// A schema turned into one reader per argument, once, at registration; the call path compares no
// types. Immutable afterwards.
struct ArgumentPlan {
  std::vector<ArgumentReader> readers;
  std::vector<std::string> names;
  // Whether a call may write the argument, for each; empty where no argument is written. Set by who
  // knows the operator's effects.
  std::vector<std::uint8_t> written;
  // Integral operands step aside: native raises on a zero divisor, compiled code traps.
  bool aside_if_integral = false;
  // Whether autocast is part of the key: of an operator that is a function, whose own operators it
  // changes.
  bool reads_autocast = false;
};

// The plan for `schema`, or the reason why a call of it has no key ("argument 'generator' has type
// Generator?, which a key cannot hold").
struct PlanResult {
  ArgumentPlan plan;
  std::string refusal;  // empty when the plan is good
};
PlanResult make_argument_plan(const c10::FunctionSchema& schema);

}  // namespace eagercache
