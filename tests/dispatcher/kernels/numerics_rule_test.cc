// Which kernels may answer where replicas or written arguments ask for native's very bits.

#include "dispatcher/kernels/numerics_rule.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

using Outcome = LoadedKernel::Outcome;

TEST(NumericsRule, AKernelThatEqualsNativeBitForBitMayAlwaysAnswer) {
  for (const Numerics asked : {Numerics::kAccurate, Numerics::kBitwise}) {
    EXPECT_EQ(numerics_refusal("bitwise", asked, true, true), "");
  }
}

TEST(NumericsRule, AnyOtherMayOnlyWhereNothingAsksForBits) {
  for (const char* proved : {"accurate", ""}) {
    EXPECT_EQ(numerics_refusal(proved, Numerics::kAccurate, false, false), "");
    EXPECT_NE(numerics_refusal(proved, Numerics::kBitwise, false, false), "");
    EXPECT_NE(numerics_refusal(proved, Numerics::kAccurate, true, false), "");
  }
}

TEST(NumericsRule, OperatorsThatWriteTheirArgumentsHaveBitwiseKernelsOnly) {
  EXPECT_NE(numerics_refusal("accurate", Numerics::kAccurate, false, true), "");
}

class ReplicaTest : public HookTest {
 protected:
  Outcome run(LoadedKernel& kernel) {
    const at::Tensor input = at::zeros({2});
    const at::Tensor* const inputs[] = {&input};
    at::Tensor output;
    return kernel.run(inputs, {&output, 1}, at::kCPU);
  }
  LoadedKernel& kernel_ = *make_replica_kernel(&filling_kernel(42));
};

TEST_F(ReplicaTest, AForwardPassIsAnsweredByTheKernel) {
  const at::AutoGradMode grad(true);
  EXPECT_EQ(run(kernel_), Outcome::kAnswered);
}

TEST_F(ReplicaTest, WithoutGradientsNativeAnswers) {
  const at::NoGradGuard no_grad;
  EXPECT_EQ(run(kernel_), Outcome::kNotStarted);
}

TEST_F(ReplicaTest, ABackwardPassIsAnsweredByTheKernel) {
  at::Tensor leaf = at::ones({2}).requires_grad_();
  Outcome outcome = Outcome::kFailed;
  bool grad_mode = true;
  leaf.register_hook([&](const at::Tensor& gradient) {
    grad_mode = at::GradMode::is_enabled();
    outcome = run(kernel_);
    return gradient;
  });
  leaf.mul(2).sum().backward();
  EXPECT_FALSE(grad_mode);
  EXPECT_EQ(outcome, Outcome::kAnswered);
}

TEST_F(ReplicaTest, ACallWhoseKernelStepsBackIsNativesAndTheKernelIsAskedAgain) {
  OperatorHook& sin = hook("aten::sin");
  const at::Tensor x = at::ones({3});
  install(sin, {x}, kernel_);
  {
    const at::NoGradGuard no_grad;
    EXPECT_LT(at::sin(x)[0].item<double>(), 1);
  }
  EXPECT_EQ(at::sin(x)[0].item<double>(), 42);
}

}  // namespace
}  // namespace eagercache
