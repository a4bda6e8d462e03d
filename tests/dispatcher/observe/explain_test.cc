// What explain() says of calls, and that saying it changes nothing.

#include "dispatcher/observe/explain.h"

#include <gtest/gtest.h>

#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

class ExplainTest : public HookTest {
 protected:
  CallExplanation explained(const at::Tensor& tensor) {
    Explainer explainer;
    (void)at::sin(tensor);
    EXPECT_EQ(explainer.calls().size(), 1U);
    return explainer.calls().empty() ? CallExplanation{} : explainer.calls().front();
  }

  const at::Tensor x_ = at::linspace(0.0, 1.0, 32).reshape({4, 8});
  OperatorHook& sin_ = hook("aten::sin");
};

TEST_F(ExplainTest, AHitIsSaidWithoutRunningTheKernelOrCountingTheCall) {
  FakeKernel& fake = filling_kernel(42);
  install(sin_, {x_}, fake);
  CallExplanation call;
  const CallCounts counts = counted(sin_, [&] { call = explained(x_); });
  EXPECT_EQ(call.outcome, "hit");
  EXPECT_EQ(call.op, "aten::sin");
  EXPECT_EQ(call.digest, digest(sin_, {x_}).hex());
  EXPECT_EQ(fake.runs(), 0);
  EXPECT_EQ(total(counts), 0U);
  EXPECT_TRUE(at::equal(at::sin(x_), at::full_like(x_, 42)));  // over: the kernel answers again
}

TEST_F(ExplainTest, ADecisionForNativeIsSaid) {
  CallView view;
  const torch::jit::Stack stack{x_};
  ASSERT_EQ(sin_.read_call(stack, view), AsideReason::kNone);
  sin_.table().set_native(view.key.words(), hash_words(view.key.words()));
  EXPECT_EQ(explained(x_).outcome, "native");
}

TEST_F(ExplainTest, ACallThatStepsAsideNamesTheRule) {
  const CallExplanation call = explained(at::zeros({0}));
  EXPECT_EQ(call.outcome, "aside");
  EXPECT_EQ(call.reason, "empty_tensor");
  EXPECT_EQ(call.digest, "");
}

TEST_F(ExplainTest, ACallThatTheTableOfDeniedOperatorsNamesIsNoMiss) {
  (void)hook("aten::prod");
  const auto said = [](at::ScalarType dtype) {
    Explainer explainer;
    (void)at::prod(at::ones({7}, dtype));
    return explainer.calls().at(0);
  };
  EXPECT_EQ(said(at::kDouble).outcome, "miss");
  EXPECT_EQ(said(at::kFloat).outcome, "native");
  EXPECT_NE(said(at::kFloat).reason.find("order of the factors"), std::string::npos)
      << said(at::kFloat).reason;
}

TEST_F(ExplainTest, AMissNamesTheFieldThatDiffersFromTheNearestKnownKey) {
  install(sin_, {x_}, filling_kernel(42));
  install(sin_, {at::zeros({4, 8}, at::kDouble)}, filling_kernel(43));
  const CallExplanation call = explained(at::zeros({5, 8}));
  EXPECT_EQ(call.outcome, "miss");
  EXPECT_NE(call.difference.find("sizes [5, 8] is not [4, 8]"), std::string::npos)
      << call.difference;
  EXPECT_EQ(call.nearest_state, "kernel");
  EXPECT_EQ(state(sin_, {at::zeros({5, 8})}), EntryState::kAbsent);  // asking enters nothing
}

TEST_F(ExplainTest, AMissWithoutAnyKnownKeyHasNoNearest) {
  sin_.table().clear();
  const CallExplanation call = explained(x_);
  EXPECT_EQ(call.outcome, "miss");
  EXPECT_EQ(call.difference, "");
  EXPECT_EQ(call.nearest_state, "");
}

TEST_F(ExplainTest, AVerdictIsNearerThanAKeyThatWasOnlyMet) {
  sin_.table().clear();
  install(sin_, {at::zeros({7, 9})}, filling_kernel(42));
  (void)at::sin(at::zeros({4, 9}));  // met: one word away from the call below, the kernel two
  const CallExplanation call = explained(at::zeros({4, 8}));
  EXPECT_NE(call.nearest_state, "pending") << call.difference;
}

TEST_F(ExplainTest, AnOperatorThatIsNotEnabledSaysSo) {
  sin_.set_active(false);
  const CallExplanation call = explained(x_);
  EXPECT_EQ(call.outcome, "native");
  EXPECT_NE(call.reason.find("enabled"), std::string::npos) << call.reason;
  sin_.set_active(true);
}

TEST_F(ExplainTest, WhatANativeKernelCallsIsNotExplained) {
  hook("aten::var.correction");
  Explainer explainer;
  (void)at::var(x_, at::OptionalIntArrayRef(at::IntArrayRef{1}), c10::Scalar(1), false);
  ASSERT_EQ(explainer.calls().size(), 1U);
  EXPECT_EQ(explainer.calls().front().op, "aten::var.correction");
}

TEST_F(ExplainTest, OneAtATimePerThread) {
  Explainer explainer;
  EXPECT_THROW(Explainer(), std::logic_error);
  (void)at::sin(x_);
  EXPECT_EQ(explainer.calls().size(), 1U);
}

}  // namespace
}  // namespace eagercache
