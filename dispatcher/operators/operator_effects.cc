#include "dispatcher/operators/operator_effects.h"

#include <torch/csrc/utils/schema_info.h>

#include <algorithm>
#include <array>
#include <optional>

namespace eagercache {
namespace {

// What an argument or a return of these names holds is known to the operator's family only.
constexpr auto kOpaqueNames = std::to_array<std::string_view>({
    "reserve",
    "reserveSpace",
    "reservedSpace",
    "workspace",
    "philox_seed",
    "philox_offset",
    "rng_state",
    "dropout_state",
    "debug_attn_mask",
    "weight_buf",
});

// Namespaces of PyTorch's own whose operators talk to other processes, take packed weights, are
// parts of its compilers or lie about aliases. None is called by eager programs as a plain function
// of tensors.
constexpr auto kForeignNamespaces = std::to_array<std::string_view>({
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "_quantized",
    "c10d",
    "c10d_functional",
    "cuda",
    "debugprims",
    "higher_order",
    "inductor",
    "mkl",
    "mkldnn",
    "mkldnn_prepacked",
    "onednn",
    "prepacked",
    "prim",
    "prims",
    "profiler",
    "quantization",
    "quantized",
    "quantized_decomposed",
    "rngprims",
    "sparse",
    "static_runtime",
    "symm_mem",
    "xnnpack",
});

bool contains(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

std::optional<std::size_t> argument_index(const c10::FunctionSchema& schema,
                                          std::string_view name) {
  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) {
      return i;
    }
  }
  return std::nullopt;
}

// A list's own alias set is empty; what counts is that of its elements.
bool same_alias_set(const c10::AliasInfo& left, const c10::AliasInfo& right) {
  if (!left.containedTypes().empty()) {
    return same_alias_set(left.containedTypes().front(), right);
  }
  if (!right.containedTypes().empty()) {
    return same_alias_set(left, right.containedTypes().front());
  }
  return left.beforeSets() == right.beforeSets();
}

bool same_alias_set(const c10::Argument& left, const c10::Argument& right) {
  return left.alias_info() != nullptr && right.alias_info() != nullptr &&
         same_alias_set(*left.alias_info(), *right.alias_info());
}

bool is_handed_back(const c10::FunctionSchema& schema, const c10::Argument& argument) {
  if (argument.is_out() || (schema.returns().empty() && schema.name().ends_with('_'))) {
    return true;  // _foreach_add_ returns nothing
  }
  return std::ranges::any_of(schema.returns(), [&argument](const c10::Argument& result) {
    return same_alias_set(argument, result);
  });
}

void read_writes(const c10::FunctionSchema& schema, OperatorEffects& effects) {
  const auto& arguments = schema.arguments();
  // SchemaInfo knows training operators whose schemas mark nothing. It is not asked about others:
  // it warns on some that mark two arguments.
  const bool says_nothing = std::ranges::all_of(
      arguments, [](const c10::Argument& argument) { return argument.alias_info() == nullptr; });
  torch::utils::SchemaInfo info(schema);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* alias = arguments[i].alias_info();
    const bool marked = alias != nullptr && alias->isWrite();
    if (marked ||
        (says_nothing && info.is_mutable(c10::SchemaArgument(c10::SchemaArgType::input, i)))) {
      effects.writes.push_back({i, marked, marked && is_handed_back(schema, arguments[i]), {}});
    }
  }
}

OutputEffect read_output(const c10::FunctionSchema& schema, std::size_t index) {
  const c10::Argument& result = schema.returns()[index];
  OutputEffect effect;
  if (result.alias_info() == nullptr) {
    effect.kind = contains(kOpaqueNames, result.name()) ? OutputKind::kOpaque : OutputKind::kFresh;
    return effect;
  }
  effect.kind = result.alias_info()->isWrite() ? OutputKind::kArgument : OutputKind::kAlias;
  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (same_alias_set(arguments[i], result)) {
      effect.arguments.push_back(i);
    }
  }
  return effect;
}

void add_write(const c10::FunctionSchema& schema, const EffectRow& row, OperatorEffects& effects) {
  const std::optional<std::size_t> index = argument_index(schema, row.argument);
  if (!index) {
    return;
  }
  const auto known =
      std::ranges::find(effects.writes, *index, [](const WrittenArgument& w) { return w.index; });
  if (known == effects.writes.end()) {
    effects.writes.push_back({*index, false, false, row.when});
  } else {
    known->when = row.when;
  }
}

void set_outputs(OutputKind kind, std::size_t argument, OperatorEffects& effects) {
  for (OutputEffect& output : effects.outputs) {
    output.kind = kind;
    if (kind == OutputKind::kAlias) {
      output.arguments.push_back(argument);
    }
  }
}

void apply_row(const c10::FunctionSchema& schema, const EffectRow& row, OperatorEffects& effects) {
  switch (row.kind) {
    case EffectKind::kWrites:
      add_write(schema, row, effects);
      break;
    case EffectKind::kAliases:
      if (const auto index = argument_index(schema, row.argument)) {
        set_outputs(OutputKind::kAlias, *index, effects);
      }
      break;
    case EffectKind::kOpaqueOutput:
      if (const auto output = static_cast<std::size_t>(row.output);
          output < effects.outputs.size() && effects.outputs[output].kind == OutputKind::kFresh) {
        effects.outputs[output].kind = OutputKind::kOpaque;
      }
      break;
    case EffectKind::kOpaqueInput:
      if (const auto index = argument_index(schema, row.argument)) {
        effects.opaque_inputs.push_back(*index);
      }
      break;
    case EffectKind::kUnspecified:
      set_outputs(OutputKind::kUnspecified, 0, effects);
      break;
    case EffectKind::kNotDense:
      set_outputs(OutputKind::kNotDense, 0, effects);
      break;
    case EffectKind::kMovesFresh:
      effects.moves_fresh = !effects.writes_arguments();  // forms with out= make none
      break;
    case EffectKind::kOutside:
      effects.outside = row.clause;
      break;
  }
}

std::string output_refusal(OutputKind kind, bool marked) {
  switch (kind) {
    case OutputKind::kFresh:
    case OutputKind::kArgument:
      return {};
    case OutputKind::kAlias:
      return marked ? "it returns a view" : "it may return a view that its schema does not mark";
    case OutputKind::kOpaque:
      return "it hands on opaque state to its own backward";
    case OutputKind::kUnspecified:
      return "the contents of its output are unspecified";
    case OutputKind::kNotDense:
      return "its output is no dense tensor";
  }
  return {};
}

}  // namespace

const WrittenArgument* OperatorEffects::write_of(std::size_t argument) const noexcept {
  const auto found =
      std::ranges::find(writes, argument, [](const WrittenArgument& write) { return write.index; });
  return found == writes.end() ? nullptr : &*found;
}

std::string OperatorEffects::refusal(const c10::FunctionSchema& schema) const {
  if (!outside.empty()) {
    return std::string(outside);
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const bool marked = schema.returns()[i].alias_info() != nullptr;
    if (std::string reason = output_refusal(outputs[i].kind, marked); !reason.empty()) {
      return reason;
    }
  }
  return opaque_inputs.empty() ? "" : "it takes opaque state of its own forward";
}

OperatorEffects operator_effects(const c10::FunctionSchema& schema) {
  OperatorEffects effects;
  const std::string& name = schema.name();
  if (contains(kForeignNamespaces, std::string_view(name).substr(0, name.find("::")))) {
    effects.outside = "it belongs to a part of PyTorch whose operators are not plain functions";
  }
  read_writes(schema, effects);
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    if (contains(kOpaqueNames, schema.arguments()[i].name())) {
      effects.opaque_inputs.push_back(i);
    }
  }
  for (std::size_t i = 0; i < schema.returns().size(); ++i) {
    effects.outputs.push_back(read_output(schema, i));
  }
  for (const EffectRow& row : effect_rows()) {
    if (row.op == name) {
      apply_row(schema, row, effects);
    }
  }
  return effects;
}

}  // namespace eagercache
