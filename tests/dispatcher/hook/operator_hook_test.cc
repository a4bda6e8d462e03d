// One hook in front of native: hits, failures, counting, and what stays native.

#include "dispatcher/hook/operator_hook.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <gtest/gtest.h>

#include "tests/dispatcher/hook_fixture.h"
#include "tests/dispatcher/restored_globals.h"

namespace eagercache {
namespace {

using Outcome = LoadedKernel::Outcome;

class OperatorHookTest : public HookTest {
 protected:
  const at::Tensor x_ = at::linspace(0.0, 1.0, 32).reshape({4, 8});
  OperatorHook& sin_ = hook("aten::sin");
};

TEST_F(OperatorHookTest, AHitIsAnsweredByTheKernel) {
  FakeKernel& fake = filling_kernel(42);
  install(sin_, {x_}, fake);
  at::Tensor result;
  const CallCounts counts = counted(sin_, [&] { result = at::sin(x_); });
  EXPECT_TRUE(at::equal(result, at::full_like(x_, 42)));
  EXPECT_EQ(fake.runs(), 1);
  EXPECT_EQ(count(counts, CallOutcome::kHit), 1U);
  EXPECT_EQ(total(counts), 1U);
}

TEST_F(OperatorHookTest, AnotherShapeIsNotAnsweredByTheKernel) {
  FakeKernel& fake = filling_kernel(42);
  install(sin_, {x_}, fake);
  const at::Tensor other = at::zeros({3});
  EXPECT_TRUE(at::equal(at::sin(other), at::zeros({3})));
  EXPECT_EQ(fake.runs(), 0);
}

TEST_F(OperatorHookTest, AKernelWithTwoOutputsAnswersBoth) {
  OperatorHook& aminmax = hook("aten::aminmax");
  FakeKernel& fake = kernel(1, 2, [](FakeKernel::Inputs, FakeKernel::Outputs out) {
    out[0] = at::scalar_tensor(-7.0);
    out[1] = at::scalar_tensor(7.0);
    return Outcome::kAnswered;
  });
  install(aminmax, {x_, c10::IValue(), false}, fake);
  const auto [low, high] = at::aminmax(x_);
  EXPECT_EQ(low.item<double>(), -7.0);
  EXPECT_EQ(high.item<double>(), 7.0);
}

TEST_F(OperatorHookTest, TheKernelGetsTheTensorsOfAListInOrder) {
  OperatorHook& cat = hook("aten::cat");
  const at::Tensor y = at::ones({2, 8});
  FakeKernel& fake = kernel(2, 1, [](FakeKernel::Inputs in, FakeKernel::Outputs out) {
    out[0] = at::scalar_tensor(in[0]->size(0) * 10 + in[1]->size(0));
    return Outcome::kAnswered;
  });
  install(cat, {tensor_list({x_, y}), 0}, fake);
  EXPECT_EQ(at::cat({x_, y}, 0).item<double>(), 42.0);
}

TEST_F(OperatorHookTest, ValuesBelowTheOperatorsOwnStayWhereTheyAre) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::sin", "");
  install(sin_, {x_}, filling_kernel(42));
  for (const at::Tensor& argument : {x_, at::zeros({3})}) {  // a hit, then a miss
    torch::jit::Stack stack{std::string("mine"), 17, argument};
    op.callBoxed(&stack);
    ASSERT_EQ(stack.size(), 3U);
    EXPECT_EQ(stack[0].toStringRef(), "mine");
    EXPECT_EQ(stack[1].toInt(), 17);
    EXPECT_EQ(stack[2].toTensor().sizes(), argument.sizes());
  }
}

TEST_F(OperatorHookTest, AfterAKernelsErrorNativeAnswersAndTheKernelIsNotAskedAgain) {
  FakeKernel& fake =
      kernel(1, 1, [](FakeKernel::Inputs, FakeKernel::Outputs) { return Outcome::kFailed; });
  const at::Tensor expected = at::sin(x_);
  install(sin_, {x_}, fake);
  const CallCounts counts = counted(sin_, [&] {
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::equal(at::sin(x_), expected));
    }
  });
  EXPECT_EQ(fake.runs(), 1);
  EXPECT_EQ(state(sin_, {x_}), EntryState::kNative);
  EXPECT_EQ(count(counts, CallOutcome::kNative), 3U);
  EXPECT_EQ(total(counts), 3U);
  const auto verdicts = runtime().verdicts(sin_);
  EXPECT_TRUE(std::any_of(verdicts.begin(), verdicts.end(), [](const VerdictRecord& verdict) {
    return verdict.decision == "failed" && verdict.reason == "the kernel reported an error";
  }));
}

TEST_F(OperatorHookTest, AKernelThatDidNotStartIsAskedAgain) {
  int calls = 0;
  FakeKernel& fake = kernel(1, 1, [&calls](FakeKernel::Inputs in, FakeKernel::Outputs out) {
    if (++calls == 1) {
      return Outcome::kNotStarted;
    }
    out[0] = at::full_like(*in[0], 42);
    return Outcome::kAnswered;
  });
  const at::Tensor zeros = at::zeros({4, 8});
  install(sin_, {zeros}, fake);
  EXPECT_TRUE(at::equal(at::sin(zeros), zeros));
  EXPECT_TRUE(at::equal(at::sin(zeros), at::full_like(zeros, 42)));
}

TEST_F(OperatorHookTest, AHitOfATensorThatRequiresGradHasItsGradient) {
  install(sin_, {x_}, kernel(1, 1, [](FakeKernel::Inputs in, FakeKernel::Outputs out) {
            out[0] = at::full_like(*in[0], 42);
            return Outcome::kAnswered;
          }));
  const at::Tensor leaf = x_.clone().requires_grad_();
  const at::Tensor result = at::sin(leaf);
  EXPECT_EQ(result.sum().item<double>(), 42.0 * 32);
  ASSERT_TRUE(result.requires_grad());
  result.sum().backward();
  EXPECT_TRUE(at::allclose(leaf.grad(), at::cos(x_)));
}

TEST_F(OperatorHookTest, AHitInInferenceModeGivesAnInferenceTensorLikeNative) {
  install(sin_, {x_}, filling_kernel(42));
  const c10::InferenceMode inference;
  EXPECT_TRUE(at::sin(x_).is_inference());
}

TEST_F(OperatorHookTest, APolicyChangeForgetsVerdicts) {
  FakeKernel& fake = filling_kernel(42);
  install(sin_, {x_}, fake);
  runtime().set_policy(runtime().policy());
  EXPECT_EQ(state(sin_, {x_}), EntryState::kAbsent);
  at::sin(x_);
  EXPECT_EQ(fake.runs(), 0);
}

TEST_F(OperatorHookTest, WithAnsweringOffNativeAnswersUncounted) {
  FakeKernel& fake = filling_kernel(42);
  install(sin_, {x_}, fake);
  runtime().set_answering(false);
  EXPECT_EQ(total(counted(sin_, [&] { EXPECT_LE(at::sin(x_).max().item<double>(), 1.0); })), 0U);
  runtime().set_answering(true);
  EXPECT_EQ(at::sin(x_).max().item<double>(), 42.0);
}

TEST_F(OperatorHookTest, AnInactiveHookIsNativeAndUncounted) {
  FakeKernel& fake = filling_kernel(42);
  install(sin_, {x_}, fake);
  sin_.set_active(false);
  EXPECT_EQ(total(counted(sin_, [&] { at::sin(x_); })), 0U);
  EXPECT_EQ(fake.runs(), 0);
}

TEST_F(OperatorHookTest, EveryCallCountsExactlyOnce) {
  install(sin_, {x_}, filling_kernel(42));
  const CallCounts counts = counted(sin_, [&] {
    at::sin(x_);                          // hit
    at::sin(at::zeros({3}));              // miss: the first meeting
    at::sin(at::zeros({3}));              // native: decided, for there is no store
    at::sin(at::zeros({0}));              // aside
    at::sin(at::eye(3).to_sparse_csr());  // not ours: another dispatch key
  });
  EXPECT_EQ(count(counts, CallOutcome::kHit), 1U);
  EXPECT_EQ(count(counts, CallOutcome::kMiss), 1U);
  EXPECT_EQ(count(counts, CallOutcome::kAside), 1U);
  EXPECT_EQ(counts.aside[static_cast<std::size_t>(AsideReason::kEmptyTensor)], 1U);
  EXPECT_EQ(total(counts) - count(counts, CallOutcome::kNative), 3U);
  EXPECT_GE(count(counts, CallOutcome::kNative), 1U);
}

TEST_F(OperatorHookTest, HooksMetInsideAKernelAreNativeAndUncounted) {
  const at::Tensor zeros = at::zeros({4, 8});
  FakeKernel& fake = kernel(1, 1, [](FakeKernel::Inputs in, FakeKernel::Outputs out) {
    out[0] = at::sin(*in[0]) + 42;
    return Outcome::kAnswered;
  });
  install(sin_, {zeros}, fake);
  const CallCounts counts =
      counted(sin_, [&] { EXPECT_TRUE(at::equal(at::sin(zeros), at::full_like(zeros, 42))); });
  EXPECT_EQ(fake.runs(), 1);
  EXPECT_EQ(total(counts), 1U);
}

TEST_F(OperatorHookTest, NativesErrorsPassThroughUnchanged) {
  OperatorHook& cat = hook("aten::cat");
  const auto message = [] {
    try {
      at::cat({at::zeros({2, 3}), at::zeros({3, 4})}, 0);
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string();
  };
  std::string hooked;
  const CallCounts counts = counted(cat, [&] { hooked = message(); });
  EXPECT_EQ(total(counts), 1U);
  runtime().set_answering(false);
  EXPECT_NE(hooked, "");
  EXPECT_EQ(hooked, message());
}

TEST_F(OperatorHookTest, RegisteringTwiceGivesTheSameHook) {
  EXPECT_EQ(&hook("aten::sin"), &sin_);
  EXPECT_EQ(runtime().find_hook("aten::sin", "", "CPU"), &sin_);
  EXPECT_EQ(runtime().find_hook("aten::sin", "", "CUDA"), nullptr);
  EXPECT_FALSE(sin_.is_shadowed());
}

TEST_F(OperatorHookTest, WhatCannotBeHookedIsRefusedWithAReason) {
  const auto status = [](const char* name, const char* overload, const char* key) {
    return runtime().register_operator(name, overload, key).status();
  };
  const std::size_t hooks = runtime().hooks().size();
  EXPECT_EQ(status("aten::no_such_operator", "", "CPU").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status("aten::sin", "no_such_overload", "CPU").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status("aten::sin", "", "Nonsense").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status("aten::sin", "", "AutogradCPU").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status("aten::view", "", "CPU").code(), StatusCode::kUnsupported);
  EXPECT_EQ(status("aten::layer_norm", "", "CPU").code(), StatusCode::kUnsupported);
  EXPECT_NE(status("aten::layer_norm", "", "CPU").message().find("composite"), std::string::npos);
  EXPECT_EQ(runtime().hooks().size(), hooks);
}

class ThreadStateTest : public OperatorHookTest {
 protected:
  AsideReason reason() const {
    CallView view;
    return sin_.read_call({x_}, view);
  }
  RestoredGlobals globals_;
};

TEST_F(ThreadStateTest, FlushedDenormalsStepAside) {
  EXPECT_EQ(reason(), AsideReason::kNone);
  ASSERT_TRUE(at::globalContext().setFlushDenormal(true));
  EXPECT_EQ(reason(), AsideReason::kFloatingPointMode);
  EXPECT_EQ(count(counted(sin_, [&] { at::sin(x_); }), CallOutcome::kAside), 1U);
  at::globalContext().setFlushDenormal(false);
  EXPECT_EQ(reason(), AsideReason::kNone);
}

TEST_F(ThreadStateTest, FunctionTransformsStepAside) {
  for (const c10::DispatchKey key :
       {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchVmapMode,
        c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::Functionalize}) {
    const c10::impl::IncludeDispatchKeyGuard include(key);
    EXPECT_EQ(reason(), AsideReason::kDispatchState) << c10::toString(key);
  }
  EXPECT_EQ(reason(), AsideReason::kNone);
}

class IntegerDivisionTest : public HookTest {};

TEST_F(IntegerDivisionTest, StepsAsideWhenAllOperandsAreIntegral) {
  OperatorHook& remainder = hook("aten::remainder.Tensor");
  const auto reason = [&](const at::Tensor& left, const at::Tensor& right) {
    CallView view;
    return remainder.read_call({left, right}, view);
  };
  const at::Tensor integers = at::ones({4}, at::kLong);
  const at::Tensor flags = at::ones({4}, at::kBool);
  const at::Tensor floats = at::ones({4});
  EXPECT_EQ(reason(integers, integers), AsideReason::kIntegerDivision);
  EXPECT_EQ(reason(integers, flags), AsideReason::kIntegerDivision);
  EXPECT_EQ(reason(integers, floats), AsideReason::kNone);
  EXPECT_EQ(reason(floats, floats), AsideReason::kNone);
  EXPECT_THROW(at::remainder(integers, at::zeros({4}, at::kLong)), c10::Error);
}

TEST_F(IntegerDivisionTest, AnIntegralScalarDivisorIsSeenToo) {
  OperatorHook& floor_divide = hook("aten::remainder.Scalar");
  CallView view;
  const at::Tensor integers = at::ones({4}, at::kLong);
  EXPECT_EQ(floor_divide.read_call({integers, 0}, view), AsideReason::kIntegerDivision);
  EXPECT_EQ(floor_divide.read_call({integers, 0.5}, view), AsideReason::kNone);
}

}  // namespace
}  // namespace eagercache
