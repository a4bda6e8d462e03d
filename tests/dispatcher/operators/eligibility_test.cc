// Which operators may be answered by kernels, over the operators that this torch has.

#include "dispatcher/operators/eligibility.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <string>
#include <vector>

#include "dispatcher/operators/default_operators.h"
#include "dispatcher/operators/operator_rules.h"
#include "guards/builder/torch_compat.h"

namespace eagercache {
namespace {

c10::OperatorName name_of(const std::string& text) {
  const std::size_t dot = text.find('.');
  return {text.substr(0, dot), dot == std::string::npos ? "" : text.substr(dot + 1)};
}

Eligibility on_cpu(const std::string& name) {
  const auto op = c10::Dispatcher::singleton().findSchema(name_of(name));
  EXPECT_TRUE(op) << name << " does not exist";
  return op ? check_eligibility(*op, c10::DispatchKey::CPU) : Eligibility{};
}

void expect_refused(const std::vector<const char*>& names, const std::string& clause) {
  for (const char* name : names) {
    const Eligibility result = on_cpu(name);
    EXPECT_FALSE(result.eligible) << name;
    EXPECT_NE(result.reason.find(clause), std::string::npos) << name << ": " << result.reason;
  }
}

std::string plan_refusal(const std::string& arguments) {
  return make_argument_plan(torch::jit::parseSchema("test::op(" + arguments + ") -> Tensor"))
      .refusal;
}

TEST(Eligibility, PlainFunctionsOfTensorsAreEligible) {
  for (const char* name : {"aten::abs", "aten::add.Tensor", "aten::var.correction", "aten::cat",
                           "aten::native_layer_norm", "aten::_softmax", "aten::aminmax"}) {
    const Eligibility result = on_cpu(name);
    EXPECT_TRUE(result.eligible) << name << ": " << result.reason;
    EXPECT_FALSE(result.composite) << name;
  }
  EXPECT_EQ(on_cpu("aten::aminmax").num_returns, 2U);
}

TEST(Eligibility, ViewsAreNot) {
  expect_refused({"aten::view", "aten::transpose.int", "aten::slice.Tensor", "aten::expand",
                  "aten::detach", "aten::as_strided"},
                 "view");
}

TEST(Eligibility, ViewsThatTheSchemaDoesNotMarkAreNot) {
  expect_refused({"aten::_unsafe_view", "aten::lift_fresh"}, "view");
}

using Indices = std::vector<std::size_t>;
using Flags = std::vector<std::uint8_t>;

TEST(Eligibility, InPlaceAndOutOperatorsHandBackWhatTheyWrite) {
  const Eligibility in_place = on_cpu("aten::add_.Tensor");
  ASSERT_TRUE(in_place.eligible) << in_place.reason;
  EXPECT_EQ(in_place.plan.written, (Flags{1, 0, 0}));
  EXPECT_EQ(in_place.returned_arguments, Indices{0});
  const Eligibility out = on_cpu("aten::aminmax.out");
  ASSERT_TRUE(out.eligible) << out.reason;
  EXPECT_EQ(out.plan.written, (Flags{0, 0, 0, 1, 1}));
  EXPECT_EQ(out.returned_arguments, (Indices{3, 4}));
  EXPECT_TRUE(on_cpu("aten::abs").plan.written.empty());
}

TEST(Eligibility, ListsMayBeReturnedOrWritten) {
  const Eligibility made = on_cpu("aten::_foreach_add.Scalar");
  ASSERT_TRUE(made.eligible) << made.reason;
  EXPECT_TRUE(made.returns_list);
  EXPECT_TRUE(made.plan.written.empty());
  const Eligibility written = on_cpu("aten::_foreach_add_.Scalar");
  ASSERT_TRUE(written.eligible) << written.reason;
  EXPECT_FALSE(written.returns_list);
  EXPECT_EQ(written.num_returns, 0U);
  EXPECT_EQ(written.plan.written, (Flags{1, 0}));
}

TEST(Eligibility, WritersThatTheSchemaDoesNotMarkAreKnown) {
  const Eligibility norm = on_cpu("aten::native_batch_norm");
  ASSERT_TRUE(norm.eligible) << norm.reason;
  EXPECT_EQ(norm.plan.written, (Flags{0, 0, 0, 1, 1, 0, 0, 0}));
  EXPECT_EQ(norm.returned_arguments, Indices(3, Eligibility::kFresh));
}

TEST(Eligibility, OperatorsThatChangeMoreThanTheContentsAreNot) {
  expect_refused(
      {"aten::resize_", "aten::resize_as_", "aten::_resize_output_", "aten::set_.source_Tensor"},
      "");
  for (const char* name : {"aten::t_", "aten::squeeze_", "aten::as_strided_", "aten::detach_"}) {
    EXPECT_FALSE(on_cpu(name).eligible) << name;
  }
}

TEST(Eligibility, RandomOperatorsAreNot) {
  for (const char* name : {"aten::rand", "aten::randn", "aten::bernoulli", "aten::native_dropout",
                           "aten::multinomial", "aten::randperm", "aten::rand_like"}) {
    const Eligibility result = on_cpu(name);
    EXPECT_FALSE(result.eligible) << name;
    EXPECT_FALSE(result.reason.empty()) << name;
  }
  expect_refused({"aten::native_dropout", "aten::bernoulli"}, "random");
}

TEST(Eligibility, ShapesThatDependOnValuesAreNot) {
  expect_refused({"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim"},
                 "depends on values");
}

TEST(Eligibility, OperatorsThatReturnNumbersAreNot) {
  EXPECT_FALSE(on_cpu("aten::_local_scalar_dense").eligible);
  EXPECT_FALSE(on_cpu("aten::equal").eligible);
  expect_refused({"aten::is_set_to"}, "not only tensors");
}

TEST(Eligibility, LibraryCallsAreNot) {
  expect_refused({"aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::mm.out",
                  "aten::convolution", "aten::linalg_qr", "aten::_fft_r2c"},
                 "library call");
}

TEST(Eligibility, OperatorsThatTrustPositionsAreNotOnCpu) {
  expect_refused({"aten::max_pool2d_with_indices_backward", "aten::nll_loss_backward",
                  "aten::nll_loss_backward.grad_input", "aten::segment_reduce"},
                 "trusts the positions");
  for (const char* name : {"aten::max_pool2d_with_indices_backward", "aten::nll_loss2d_backward"}) {
    EXPECT_FALSE(on_cpu(name).eligible);
  }
}

TEST(Eligibility, OperatorsWhoseMadeUpOffsetsEndNativesProcessAreNot) {
  for (const char* name :
       {"aten::_convert_indices_from_csr_to_coo", "aten::_convert_indices_from_coo_to_csr",
        "aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::segment_reduce"}) {
    for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
      const auto op = c10::Dispatcher::singleton().findSchema(name_of(name));
      ASSERT_TRUE(op) << name;
      const std::string reason = check_eligibility(*op, key).reason;
      EXPECT_TRUE(reason.find("trusts the positions") != std::string::npos ||
                  (key == c10::DispatchKey::CUDA && reason == "it has no kernel for CUDA"))
          << name << ": " << reason;
    }
  }
}

TEST(Eligibility, UninitialisedOutputsAreNot) {
  expect_refused({"aten::empty.memory_format", "aten::empty_like", "aten::empty_strided"},
                 "unspecified");
}

TEST(Eligibility, OperatorsCalledForTheirEffectOutsideAreNot) {
  for (const char* name :
       {"_c10d_functional::all_reduce", "aten::from_file", "aten::_functional_assert_async.msg"}) {
    const Eligibility result = on_cpu(name);
    EXPECT_FALSE(result.eligible) << name;
    EXPECT_FALSE(result.effects.outside.empty()) << name;
  }
}

TEST(Eligibility, SparseAndQuantizedResultsAreNot) {
  expect_refused({"aten::_to_sparse", "aten::quantize_per_tensor", "aten::to_mkldnn"}, "no dense");
}

TEST(Eligibility, OpaqueStateIsNotHandedOnOrTaken) {
  expect_refused({"aten::_ctc_loss", "aten::_scaled_dot_product_flash_attention_for_cpu"},
                 "opaque state");
  expect_refused({"aten::batch_norm_backward", "aten::_ctc_loss_backward"}, "opaque state");
}

TEST(Eligibility, CompositeOperatorsAreNamedAsSuch) {
  for (const char* name : {"aten::linear", "aten::layer_norm", "aten::dropout", "aten::matmul"}) {
    const Eligibility result = on_cpu(name);
    EXPECT_FALSE(result.eligible) << name;
    EXPECT_TRUE(result.composite) << name << ": " << result.reason;
  }
}

TEST(Eligibility, IntegerDivisionIsEligibleAndMarked) {
  for (const char* name :
       {"aten::remainder.Tensor", "aten::floor_divide", "aten::div.Tensor_mode", "aten::div.Tensor",
        "aten::div_.Tensor_mode", "aten::_foreach_div_.List"}) {
    const Eligibility result = on_cpu(name);
    EXPECT_TRUE(result.eligible) << name << ": " << result.reason;
    EXPECT_TRUE(result.plan.aside_if_integral) << name;
  }
  EXPECT_FALSE(on_cpu("aten::add.Tensor").plan.aside_if_integral);
}

TEST(Eligibility, EveryDefaultOperatorIsEligibleOnCpuOrOnCuda) {
  EXPECT_FALSE(default_operators().empty());
  for (const std::string_view name : default_operators()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name_of(std::string(name)));
    ASSERT_TRUE(op) << name;
    const Eligibility cpu = check_eligibility(*op, c10::DispatchKey::CPU);
    const Eligibility cuda = check_eligibility(*op, c10::DispatchKey::CUDA);
    EXPECT_TRUE(cpu.eligible || cuda.eligible || cuda.reason == "it has no kernel for CUDA")
        << name << ": " << cpu.reason << "; " << cuda.reason;
  }
  for (const std::string_view name : more_default_operators_on_cuda()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name_of(std::string(name)));
    ASSERT_TRUE(op) << name;
    const Eligibility cuda = check_eligibility(*op, c10::DispatchKey::CUDA);
    EXPECT_TRUE(cuda.eligible || cuda.reason == "it has no kernel for CUDA")
        << name << ": " << cuda.reason;
  }
}

void expect_sound(const c10::OperatorHandle& op, const Eligibility& result) {
  const c10::FunctionSchema& schema = op.schema();
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr) {
      EXPECT_TRUE(alias->isWrite() && result.effects.write_of(i) != nullptr);
    }
  }
  if (schema.is_mutable()) {
    EXPECT_TRUE(result.effects.writes_arguments());
  }
  EXPECT_EQ(result.effects.refusal(schema), "");
  ASSERT_EQ(result.returned_arguments.size(), schema.returns().size());
  for (std::size_t i = 0; i < result.returned_arguments.size(); ++i) {
    const std::size_t argument = result.returned_arguments[i];
    const c10::AliasInfo* alias = schema.returns()[i].alias_info();
    if (alias == nullptr) {
      EXPECT_EQ(result.effects.outputs[i].kind, OutputKind::kFresh);
      EXPECT_EQ(argument, Eligibility::kFresh);
    } else {
      EXPECT_NE(result.effects.write_of(argument), nullptr);
    }
    EXPECT_EQ(schema.returns()[i].real_type()->kind() == c10::TypeKind::TensorType,
              !result.returns_list);
  }
  EXPECT_GT(result.num_returns + result.effects.writes.size(), 0U);
  EXPECT_EQ(result.plan.written.empty(), !result.effects.writes_arguments());
  EXPECT_EQ(result.num_returns, schema.returns().size());
  ASSERT_EQ(result.plan.readers.size(), schema.arguments().size());
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    EXPECT_EQ(result.plan.names[i], schema.arguments()[i].name());
  }
  EXPECT_FALSE(op.hasTag(at::Tag::nondeterministic_seeded));
  EXPECT_FALSE(op.hasTag(at::Tag::dynamic_output_shape));
  EXPECT_FALSE(result.composite);
}

TEST(Eligibility, OverAllOperatorsTheCheckNeverThrowsAndTheEligibleOnesDoWhatTheTableSays) {
  for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
    std::size_t seen = 0;
    std::size_t eligible = 0;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findOp(name);
      if (!op) {
        continue;
      }
      SCOPED_TRACE(toString(name));
      Eligibility result;
      ASSERT_NO_THROW(result = check_eligibility(*op, key));
      ++seen;
      EXPECT_EQ(result.eligible, result.reason.empty());
      if (result.eligible) {
        ++eligible;
        expect_sound(*op, result);
      }
    }
    EXPECT_GT(seen, 2000U);
    if (key == c10::DispatchKey::CPU) {
      EXPECT_GT(eligible, 300U);
    }
  }
}

TEST(ArgumentPlan, RefusesWhatAKeyCannotHoldAndNamesTheArgument) {
  EXPECT_EQ(plan_refusal("Tensor x, Generator? generator=None"),
            "argument 'generator' has type Generator?, which a key cannot hold");
  if (compat::kHasNamedTensors) {
    EXPECT_NE(plan_refusal("Tensor x, Dimname[] dims"), "");
  }
  EXPECT_NE(plan_refusal("Storage source"), "");
  EXPECT_NE(plan_refusal("Stream s"), "");
  EXPECT_NE(plan_refusal("str[] names"), "");
  EXPECT_NE(plan_refusal("Any value"), "");
  EXPECT_NE(plan_refusal("Tensor x, ..."), "");
}

TEST(ArgumentPlan, ReadsTensorOptionsByTheirRealTypes) {
  const PlanResult planned = make_argument_plan(torch::jit::parseSchema(
      "test::op(int i, ScalarType? dtype, Layout? layout, Device? device, bool? pin, "
      "MemoryFormat? format, Tensor?[] list, SymInt[2] size) -> Tensor"));
  EXPECT_EQ(planned.refusal, "");
  EXPECT_EQ(planned.plan.readers,
            (std::vector<ArgumentReader>{ArgumentReader::kInt, ArgumentReader::kScalarType,
                                         ArgumentReader::kLayout, ArgumentReader::kDevice,
                                         ArgumentReader::kBool, ArgumentReader::kMemoryFormat,
                                         ArgumentReader::kTensorList, ArgumentReader::kIntList}));
}

TEST(OperatorRules, KnowLinearAlgebraByItsPrefixAndTheNormAsAnException) {
  ASSERT_TRUE(find_operator_rule("aten::linalg_inv_ex"));
  EXPECT_EQ(find_operator_rule("aten::linalg_inv_ex")->kind, RuleKind::kLibrary);
  EXPECT_FALSE(find_operator_rule("aten::linalg_vector_norm"));
}

TEST(OperatorRules, EveryRuleHasAReasonAndUnknownNamesHaveNoRule) {
  for (const char* name : {"aten::mm", "aten::div", "aten::nll_loss_backward"}) {
    ASSERT_TRUE(find_operator_rule(name)) << name;
    EXPECT_FALSE(find_operator_rule(name)->reason.empty()) << name;
  }
  EXPECT_FALSE(find_operator_rule("aten::abs"));
  EXPECT_FALSE(find_operator_rule("mine::mm"));
  EXPECT_FALSE(find_operator_rule(""));
}

}  // namespace
}  // namespace eagercache
