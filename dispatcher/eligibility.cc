#include "dispatcher/eligibility.h"

#include <ATen/core/enum_tag.h>

#include <utility>

#include "dispatcher/operator_rules.h"
#include "guards/left_out.h"

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

std::string excluded_by_schema(const c10::FunctionSchema& schema) {
  if (schema.is_varret() || schema.returns().empty()) {
    return "it returns no tensor";
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
    result.reason = excluded_by_schema(op.schema());
  }
  if (result.reason.empty()) {
    result.reason = excluded_by_tag(op);
  }
  const auto rule = find_operator_rule(op.schema().name());
  if (result.reason.empty() && rule && rule->kind != RuleKind::kIntegerDivision &&
      !left_out("eligible", "library")) {
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
  result.plan.aside_if_integral = rule && rule->kind == RuleKind::kIntegerDivision;
  result.num_returns = op.schema().returns().size();
  result.eligible = true;
  return result;
}

}  // namespace eagercache
