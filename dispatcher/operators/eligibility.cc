#include "dispatcher/operators/eligibility.h"

#include <ATen/core/enum_tag.h>

#include <utility>

#include "dispatcher/operators/denied_operators.h"
#include "dispatcher/operators/operator_rules.h"
#include "guards/base/left_out.h"
#include "guards/builder/overlap.h"

namespace eagercache {
namespace {

std::string excluded_by_tag(const c10::OperatorHandle& op) {
  static constexpr std::pair<at::Tag, const char*> kTags[] = {
      {at::Tag::nondeterministic_seeded, "it draws random numbers"},
      {at::Tag::data_dependent_output,
       "its result depends on values in a way a kernel cannot report"},
      {at::Tag::dynamic_output_shape, "its output's shape depends on values"},
      {at::Tag::inplace_view, "it changes a tensor's metadata in place"},
  };
  for (const auto& [tag, reason] : kTags) {
    if (op.hasTag(tag) && !left_out("eligible", "tag")) {
      return reason;
    }
  }
  return {};
}

bool is_tensor_list(const c10::Type& type) {
  return type.kind() == c10::TypeKind::ListType && type.containedTypeSize() == 1 &&
         type.containedType(0)->kind() == c10::TypeKind::TensorType;
}

std::string excluded_by_schema(const c10::FunctionSchema& schema, const OperatorEffects& effects) {
  if (schema.is_varret() || (schema.returns().empty() && !effects.writes_arguments())) {
    return "it returns no tensor";
  }
  if (effects.writes.size() > WrittenTensors::kMaxArguments) {
    return "it writes too many arguments";
  }
  for (const OutputEffect& output : effects.outputs) {
    if (output.kind == OutputKind::kArgument && output.arguments.size() != 1) {
      return "it returns one of several arguments";
    }
  }
  if (schema.returns().size() == 1 && is_tensor_list(*schema.returns().front().real_type())) {
    return effects.writes_arguments() ? "it writes arguments and returns a list" : "";
  }
  for (const c10::Argument& result : schema.returns()) {
    if (left_out("eligible", "returns")) break;
    if (result.real_type()->kind() != c10::TypeKind::TensorType) {
      return "it returns " + result.real_type()->str() + ", not only tensors";
    }
  }
  return {};
}

std::string excluded_by_kernel(const c10::OperatorHandle& op, c10::DispatchKey key,
                               bool& composite) {
  const bool direct = op.hasKernelForDispatchKey(key);
  if (!direct && op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
      !left_out("eligible", "composite")) {
    composite = true;
    return "it is composite: PyTorch takes it apart above the backend, and overriding it there "
           "would "
           "lose its gradient";
  }
  if (!op.hasComputedKernelForDispatchKey(key)) {
    return std::string("it has no kernel for ") + c10::toString(key);
  }
  if (direct && op.isKernelFallthroughKernel(key)) {
    return std::string("its kernel for ") + c10::toString(key) + " falls through";
  }
  return {};
}

// What a kernel writes, and what of its results is an argument.
void read_results(const c10::OperatorHandle& op, Eligibility& result) {
  const c10::FunctionSchema& schema = op.schema();
  if (result.effects.writes_arguments()) {
    result.plan.written.resize(schema.arguments().size());
    // In-place and out= forms have their versions moved at ADInplaceOrView. Where the operator has
    // no kernel there (_foreach_add_), the parts that native calls have.
    const bool above = op.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView);
    for (WrittenArgument& write : result.effects.writes) {
      result.plan.written[write.index] = 1;
      write.moves_version = write.moves_version && !above;
    }
  }
  result.num_returns = schema.returns().size();
  for (const OutputEffect& output : result.effects.outputs) {
    result.returned_arguments.push_back(
        output.kind == OutputKind::kArgument ? output.arguments.front() : Eligibility::kFresh);
  }
  result.returns_list =
      schema.returns().size() == 1 && is_tensor_list(*schema.returns().front().real_type());
}

}  // namespace

Eligibility check_eligibility(const c10::OperatorHandle& op, c10::DispatchKey key) {
  Eligibility result;
  if (!op.hasSchema()) {
    result.reason = "it has no schema";
    return result;
  }
  result.reason = excluded_by_kernel(op, key, result.composite);
  result.effects = operator_effects(op.schema());
  if (result.reason.empty() && !left_out("eligible", "effects")) {
    result.reason = result.effects.refusal(op.schema());
  }
  if (result.reason.empty()) {
    result.reason = excluded_by_schema(op.schema(), result.effects);
  }
  if (result.reason.empty()) {
    result.reason = excluded_by_tag(op);
  }
  if (result.reason.empty()) {
    result.reason = denial(c10::toString(op.operator_name()), c10::toString(key), {});
  }
  const auto rule = find_operator_rule(op.schema().name());
  if (result.reason.empty() && rule && rule->kind == RuleKind::kLibrary &&
      !left_out("eligible", "library")) {
    result.reason = rule->reason;
  }
  if (result.reason.empty() && rule &&
      (rule->kind == RuleKind::kChainedPositions ||
       (rule->kind == RuleKind::kTrustedPositions && key == c10::DispatchKey::CPU))) {
    result.reason = rule->reason;
  }
  if (!result.reason.empty()) {
    return result;
  }
  PlanResult plan = make_argument_plan(op.schema());
  if (!plan.refusal.empty()) {
    result.reason = std::move(plan.refusal);
    return result;
  }
  result.plan = std::move(plan.plan);
  result.plan.reads_autocast = !op.schema().name().starts_with("aten::");
  result.plan.aside_if_integral = rule && rule->kind == RuleKind::kIntegerDivision;
  read_results(op, result);
  result.eligible = true;
  return result;
}

}  // namespace eagercache
