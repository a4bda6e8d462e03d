// The program's own calls, timed: what is faster there answers.

#include "dispatcher/hook/call_trials.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <chrono>
#include <fstream>
#include <string>
#include <vector>

#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

using Outcome = LoadedKernel::Outcome;
using Verdict = CallTrial::Verdict;

// Calls by turns until there is a verdict: how many it took.
int decide(CallTrial& trial, const std::vector<std::uint64_t>& native,
           const std::vector<std::uint64_t>& kernel) {
  int calls = 0;
  for (TrialTurn turn = trial.next(); turn != TrialTurn::kNone; turn = trial.next()) {
    const std::vector<std::uint64_t>& times = turn == TrialTurn::kNative ? native : kernel;
    trial.add(turn, times[static_cast<std::size_t>(calls / 2) % times.size()]);
    ++calls;
  }
  return calls;
}

TEST(CallTrial, WhatIsAlwaysFasterWinsAtTheFirstLook) {
  CallTrial lost;
  EXPECT_EQ(decide(lost, {100, 101, 102}, {110, 111, 112}), 16);
  EXPECT_EQ(lost.verdict(), Verdict::kNative);
  EXPECT_EQ(lost.times().native_ns, 101U);
  EXPECT_EQ(lost.times().kernel_ns, 111U);
  CallTrial won;
  EXPECT_EQ(decide(won, {110, 111, 112}, {100, 101, 102}), 16);
  EXPECT_EQ(won.verdict(), Verdict::kKernel);
}

TEST(CallTrial, EqualOnesLeaveTheKernel) {
  CallTrial trial;
  EXPECT_EQ(decide(trial, {100, 104, 98, 103, 99}, {99, 103, 98, 104, 100}), 128);
  EXPECT_EQ(trial.verdict(), Verdict::kKernel);
}

TEST(CallTrial, AKernelThatLosesLessThanTwoPercentStays) {
  CallTrial trial;
  decide(trial, {1000}, {1015});
  EXPECT_EQ(trial.verdict(), Verdict::kKernel);
}

TEST(CallTrial, ASampleThatTheSchedulerTouchedDecidesNothing) {
  CallTrial trial;
  decide(trial, {100, 101, 102, 103, 104}, {90, 91, 4'000'000, 92, 8'000'000});
  EXPECT_EQ(trial.verdict(), Verdict::kKernel);
}

// A kernel of tanh that takes as long as the test says, and calls on the CPU that it answers.
class CallTrialsTest : public HookTest {
 protected:
  CallTrialsTest() { set_trials(true); }
  ~CallTrialsTest() override { set_trials(false); }

  static void set_trials(bool on, OnMiss on_miss = OnMiss::kBackground) {
    Policy policy = runtime().policy();
    policy.on_miss = on_miss;
    policy.choose = Choose::kFaster;
    policy.trials = on;
    runtime().set_policy(policy);
  }
  // Far slower than native, in samples of a machine under load, too.
  LoadedKernel& slow() {
    return kernel(1, 1, [](auto inputs, auto outputs) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(150);
      while (std::chrono::steady_clock::now() < end) {
      }
      outputs[0] = at::full_like(*inputs[0], 9.0);
      return Outcome::kAnswered;
    });
  }
  LoadedKernel& fast() {
    return kernel(1, 1, [answer = at::full_like(large_, 9.0)](auto /*inputs*/, auto outputs) {
      outputs[0] = answer;
      return Outcome::kAnswered;
    });
  }
  static void calls(const at::Tensor& x, int count) {
    for (int i = 0; i < count; ++i) {
      at::tanh(x);
    }
  }
  static void boxed_calls(const at::Tensor& x, int count) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::tanh", "");
    for (int i = 0; i < count; ++i) {
      torch::jit::Stack stack{x};
      op.callBoxed(&stack);
    }
  }

  at::Tensor x_ = at::tensor({1.0F, -2.0F});
  at::Tensor large_ = at::ones({100'000});
};

TEST_F(CallTrialsTest, AKernelThatLosesInTheProgramGoes) {
  OperatorHook& tanh = hook("aten::tanh");
  for (auto* of : {&calls, &boxed_calls}) {
    tanh.table().clear();
    set_trials(true);
    install(tanh, {x_}, slow());
    const CallCounts counts = counted(tanh, [&] { of(x_, 40'000); });
    EXPECT_EQ(state(tanh, {x_}), EntryState::kNative);
    EXPECT_EQ(total(counts), 40'000U);
    // At least sixteen samples, on average 256 hits apart; more where one was disturbed.
    EXPECT_GT(count(counts, CallOutcome::kHit), 1'500U);
    EXPECT_LT(count(counts, CallOutcome::kHit), 39'000U);
    EXPECT_NE(at::tanh(x_)[0].item<float>(), 9.0F);
    const auto verdicts = runtime().verdicts(tanh);
    ASSERT_FALSE(verdicts.empty());
    EXPECT_EQ(verdicts.back().decision, "native");
    EXPECT_NE(verdicts.back().reason.find("the program's own calls"), std::string::npos);
  }
}

TEST_F(CallTrialsTest, OneThatWinsStaysAndIsNotTriedForEver) {
  OperatorHook& tanh = hook("aten::tanh");
  install(tanh, {large_}, fast());
  const CallCounts counts = counted(tanh, [&] { calls(large_, 20'000); });
  EXPECT_EQ(state(tanh, {large_}), EntryState::kKernel);
  EXPECT_GE(count(counts, CallOutcome::kNative), 16U);  // every second one is not timed
  EXPECT_LE(count(counts, CallOutcome::kNative), 64U);  // of some 80 samples, without a verdict 80
  EXPECT_EQ(total(counts), 20'000U);
}

// The first of native's two calls is followed by another key's.
TEST_F(CallTrialsTest, AKernelGoesWhereOtherKeysComeBetweenItsCalls) {
  OperatorHook& tanh = hook("aten::tanh");
  const at::Tensor other = at::ones({3});
  install(tanh, {x_}, slow());
  install(tanh, {other}, kernel(1, 1, [&](auto /*inputs*/, auto outputs) {
            outputs[0] = other;
            return Outcome::kAnswered;
          }));
  for (int i = 0; i < 40'000 && state(tanh, {x_}) == EntryState::kKernel; ++i) {
    at::tanh(x_);
    at::tanh(other);
  }
  EXPECT_EQ(state(tanh, {x_}), EntryState::kNative);
}

TEST_F(CallTrialsTest, WhereBitsOrAnswersAreFixedNothingIsTried) {
  OperatorHook& tanh = hook("aten::tanh");
  const auto natives = [&] {
    install(tanh, {x_}, slow());
    const CallCounts counts = counted(tanh, [&] { calls(x_, 1'500); });
    EXPECT_EQ(total(counts), 1'500U);
    return count(counts, CallOutcome::kNative);
  };
  EXPECT_GT(natives(), 0U);
  set_trials(false);
  EXPECT_EQ(natives(), 0U);
  set_trials(true, OnMiss::kWait);
  EXPECT_EQ(natives(), 0U);
  set_trials(true);
  Policy replicas = runtime().policy();
  replicas.replicas = true;
  runtime().set_policy(replicas);
  EXPECT_EQ(natives(), 0U);
  replicas.replicas = false;
  runtime().set_policy(replicas);
  install(tanh, {x_}, slow());
  runtime().freeze();
  EXPECT_EQ(count(counted(tanh, [&] { calls(x_, 1'500); }), CallOutcome::kNative), 0U);
  runtime().thaw();
  at::globalContext().setDeterministicAlgorithms(true, false);
  EXPECT_EQ(natives(), 0U);
  at::globalContext().setDeterministicAlgorithms(false, false);
}

TEST_F(CallTrialsTest, TheStoreKeepsWhatTheProgramFound) {
  const auto files = use_store();
  OperatorHook& tanh = hook("aten::tanh");
  const TemporaryDirectory directory;
  const auto source = directory.path() / "kernel.cubin";
  std::ofstream(source) << "of a kernel that nobody loads";
  Manifest manifest;
  manifest.key = digest(tanh, {x_});
  manifest.kind = EntryKind::kKernel;
  manifest.facts = {{"op", "aten::tanh"}, {"search", "due"}, {"kernel_ns", "1"}};
  const Status published = files->publish(manifest, {{ObjectKind::kCubin, source}}).status();
  ASSERT_TRUE(published) << published.to_string();
  install(tanh, {x_}, slow());
  calls(x_, 40'000);
  EXPECT_TRUE(runtime().wait_until_idle(20));
  const Manifest kept = std::move(files->find(manifest.key)).value();
  EXPECT_EQ(kept.kind, EntryKind::kNative);
  EXPECT_TRUE(kept.objects.empty());
  EXPECT_EQ(kept.fact("op"), "aten::tanh");
  EXPECT_EQ(kept.fact("search"), "");
  EXPECT_NE(kept.fact("reason").find("the program's own calls"), std::string::npos);
  EXPECT_GT(std::stod(kept.fact("kernel_ns")), std::stod(kept.fact("native_ns")));
}

}  // namespace
}  // namespace eagercache
