// What the table of effects says. That it says what native does is tested in
// tests/python/programs/test_operator_effects.py.

#include "dispatcher/operators/operator_effects.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <set>
#include <string>
#include <vector>

namespace eagercache {
namespace {

struct Written {
  std::string argument;
  bool marked;
  bool moves_version;
  std::string when;
  friend bool operator==(const Written&, const Written&) = default;
};

void PrintTo(const Written& write, std::ostream* out) {
  *out << write.argument << (write.marked ? " marked" : "")
       << (write.moves_version ? " moves its version" : "") << " when " << write.when;
}

const c10::FunctionSchema& schema_of(const std::string& name, const std::string& overload = "") {
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  TORCH_CHECK(op, name, " does not exist");
  return op->schema();
}

std::vector<Written> writes_of(const c10::FunctionSchema& schema) {
  std::vector<Written> writes;
  for (const WrittenArgument& write : operator_effects(schema).writes) {
    writes.push_back({schema.arguments()[write.index].name(), write.marked, write.moves_version,
                      std::string(write.when)});
  }
  return writes;
}

std::vector<Written> writes_of(const std::string& text) {
  return writes_of(torch::jit::parseSchema(text));
}

TEST(OperatorEffects, APlainFunctionHasNone) {
  const c10::FunctionSchema& schema = schema_of("aten::var", "correction");
  const OperatorEffects effects = operator_effects(schema);
  EXPECT_FALSE(effects.writes_arguments());
  ASSERT_EQ(effects.outputs.size(), 1U);
  EXPECT_EQ(effects.outputs[0].kind, OutputKind::kFresh);
  EXPECT_EQ(effects.refusal(schema), "");
}

TEST(OperatorEffects, AnInPlaceOperatorWritesAndReturnsItsArgument) {
  const c10::FunctionSchema& schema = schema_of("aten::add_", "Tensor");
  EXPECT_EQ(writes_of(schema), (std::vector<Written>{{"self", true, true, ""}}));
  const OperatorEffects effects = operator_effects(schema);
  EXPECT_EQ(effects.outputs[0].kind, OutputKind::kArgument);
  EXPECT_EQ(effects.outputs[0].arguments, std::vector<std::size_t>{0});
  EXPECT_EQ(effects.refusal(schema), "");
}

TEST(OperatorEffects, EveryOutArgumentIsWrittenAndReturned) {
  const c10::FunctionSchema& schema = schema_of("aten::max", "dim_max");
  EXPECT_EQ(writes_of(schema),
            (std::vector<Written>{{"max", true, true, ""}, {"max_values", true, true, ""}}));
  const OperatorEffects effects = operator_effects(schema);
  EXPECT_EQ(effects.outputs[0].arguments, std::vector<std::size_t>{3});
  EXPECT_EQ(effects.outputs[1].arguments, std::vector<std::size_t>{4});
}

TEST(OperatorEffects, ListOperatorsWriteWithoutReturningAnything) {
  EXPECT_EQ(writes_of(schema_of("aten::_foreach_add_", "List")),
            (std::vector<Written>{{"self", true, true, ""}}));
  EXPECT_EQ(writes_of(schema_of("aten::split_with_sizes_copy", "out")),
            (std::vector<Written>{{"out", true, true, ""}}));
}

TEST(OperatorEffects, RunningStatisticsAreWrittenUnmarkedInTrainingOnly) {
  EXPECT_EQ(writes_of(schema_of("aten::native_batch_norm")),
            (std::vector<Written>{{"running_mean", false, false, "training"},
                                  {"running_var", false, false, "training"}}));
  EXPECT_EQ(writes_of(schema_of("aten::batch_norm_update_stats")),
            (std::vector<Written>{{"running_mean", false, false, ""},
                                  {"running_var", false, false, ""}}));
}

TEST(OperatorEffects, MarkedStatisticsKeepTheirVersionToo) {
  EXPECT_EQ(
      writes_of(schema_of("aten::_native_batch_norm_legit")),
      (std::vector<Written>{{"running_mean", true, false, ""}, {"running_var", true, false, ""}}));
}

TEST(OperatorEffects, AWriteThatTheSchemaMarksNeedsNoRow) {
  EXPECT_EQ(writes_of("mine::push(Tensor(a!) x, Tensor y) -> Tensor"),
            (std::vector<Written>{{"x", true, false, ""}}));
  EXPECT_EQ(writes_of("mine::push_(Tensor(a!) x, Tensor y) -> Tensor(a!)"),
            (std::vector<Written>{{"x", true, true, ""}}));
}

TEST(OperatorEffects, ViewsNameTheArgumentThatTheyMayShareMemoryWith) {
  for (const auto& [name, overload] :
       std::vector<std::pair<std::string, std::string>>{{"aten::view", ""},
                                                        {"aten::split", "Tensor"},
                                                        {"aten::_unsafe_view", ""},
                                                        {"aten::unsafe_split", "Tensor"},
                                                        {"aten::lift", ""}}) {
    const OperatorEffects effects = operator_effects(schema_of(name, overload));
    EXPECT_EQ(effects.outputs[0].kind, OutputKind::kAlias) << name;
    EXPECT_EQ(effects.outputs[0].arguments, std::vector<std::size_t>{0}) << name;
  }
}

TEST(OperatorEffects, WhatIsMadeAndThenFilledInPlaceHasAMovedVersion) {
  EXPECT_TRUE(operator_effects(schema_of("aten::zeros")).moves_fresh);
  EXPECT_FALSE(operator_effects(schema_of("aten::abs")).moves_fresh);
  EXPECT_FALSE(operator_effects(schema_of("aten::zeros", "out")).moves_fresh);
}

TEST(OperatorEffects, OpaqueStateIsKnownByNameOrByRow) {
  const OperatorEffects forward = operator_effects(schema_of("aten::_cudnn_rnn"));
  EXPECT_EQ(forward.outputs[0].kind, OutputKind::kFresh);
  EXPECT_EQ(forward.outputs[3].kind, OutputKind::kOpaque);
  EXPECT_EQ(forward.outputs[4].kind, OutputKind::kOpaque);
  const OperatorEffects seeded =
      operator_effects(schema_of("aten::_scaled_dot_product_efficient_attention"));
  EXPECT_EQ(seeded.outputs[2].kind, OutputKind::kOpaque);
  EXPECT_EQ(seeded.outputs[3].kind, OutputKind::kOpaque);
  EXPECT_FALSE(operator_effects(schema_of("aten::batch_norm_backward")).opaque_inputs.empty());
}

TEST(OperatorEffects, OperatorsOfUsersLibrariesAreJudgedByTheirSchemas) {
  const auto refusal = [](const char* text) {
    const c10::FunctionSchema schema = torch::jit::parseSchema(text);
    return operator_effects(schema).refusal(schema);
  };
  EXPECT_EQ(refusal("mine::f(Tensor x) -> Tensor"), "");
  EXPECT_NE(refusal("prims::f(Tensor x) -> Tensor"), "");
  EXPECT_NE(refusal("mine::f(Tensor(a) x) -> Tensor(a)"), "");
}

// A row about an operator that neither torch has, or about an argument that it has not, protects
// nobody.
TEST(OperatorEffects, EveryRowChangesTheEffectsOfAnOperatorThatExists) {
  std::set<std::string> missing;
  for (const EffectRow& row : effect_rows()) {
    bool exists = false;
    bool applies = false;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.name != row.op) {
        continue;
      }
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (!op) {
        continue;
      }
      exists = true;
      const auto& arguments = op->schema().arguments();
      applies = applies || (row.argument.empty() &&
                            static_cast<std::size_t>(row.output) < op->schema().returns().size());
      for (const c10::Argument& argument : arguments) {
        applies = applies || argument.name() == row.argument;
      }
    }
    if (!exists) {
      missing.emplace(row.op);
    } else {
      EXPECT_TRUE(applies) << row.op << " has no " << row.argument << row.output;
    }
  }
  EXPECT_TRUE(missing.empty()) << *missing.begin();
}

}  // namespace
}  // namespace eagercache
