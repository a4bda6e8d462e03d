// A hook without a runtime: its misses go where it was told, and who watches is asked first.
#include "dispatcher/hook/call_observer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

#include "dispatcher/hook/operator_hook.h"
#include "guards/table/epoch.h"

namespace eagercache {
namespace {

// Remembers what it is asked.
class NotingQueue final : public MissQueue {
 public:
  OnMiss on_miss() const noexcept override { return OnMiss::kBackground; }
  std::string policy_tag() const override { return "test"; }
  Found find_in_class(OperatorHook& /*hook*/, std::span<const Word> /*words*/,
                      std::uint64_t /*hash*/) override {
    ++asked_classes;
    return {};
  }
  Found load_now(OperatorHook& /*hook*/, std::span<const Word> /*words*/,
                 std::uint64_t /*hash*/) override {
    ADD_FAILURE() << "in the background no caller loads";
    return {};
  }
  Ask ask_for(const OperatorHook& /*hook*/, const MissNote& note) const noexcept override {
    return note.inserted ? Ask::kStore : Ask::kNothing;
  }
  void note_missed_call(OperatorHook& hook, std::span<const Word> /*words*/, std::uint64_t /*hash*/,
                        const MissNote& note, std::uint64_t /*native_ns*/,
                        std::vector<IntegerSample> /*integers*/) override {
    missed.emplace_back(hook.full_name(), note.calls);
  }
  void note_kernel_failure(OperatorHook& /*hook*/, std::span<const Word> /*words*/) override {}
  void note_wrong_answer(OperatorHook& /*hook*/, std::span<const Word> /*words*/,
                         const std::string& /*difference*/) override {}
  void note_lost_trial(OperatorHook& /*hook*/, std::span<const Word> /*words*/,
                       std::uint64_t /*hash*/, const TrialTimes& /*times*/) override {}

  int asked_classes = 0;
  std::vector<std::pair<std::string, std::uint64_t>> missed;
};

class Taker final : public CallTaker {
 public:
  explicit Taker(bool answers) : answers_(answers) { attach(); }
  ~Taker() { detach(); }
  bool take_call(OperatorHook& hook, c10::DispatchKeySet /*keys*/,
                 torch::jit::Stack* stack) override {
    ++calls;
    if (answers_) {
      torch::jit::drop(*stack, hook.plan().readers.size());
      stack->emplace_back(at::full({}, 7.0));
    }
    return answers_;
  }
  bool waits_for(const OperatorHook& /*hook*/) const noexcept override { return waits; }
  using CallTaker::detach;

  bool waits = true;
  int calls = 0;

 private:
  const bool answers_;
};

class CallObserverTest : public testing::Test {
 protected:
  CallObserverTest() {
    prepare_epoch();
    hooks_answer.store(true);
    hook().set_active(true);
    queue().missed.clear();
  }
  ~CallObserverTest() override {
    hooks_answer.store(false);
    hook().table().clear();
  }

  static NotingQueue& queue() {
    static NotingQueue queue;
    return queue;
  }
  static OperatorHook& hook() {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::sgn", "");
    const auto key = c10::DispatchKey::CPU;
    static OperatorHook hook(op, key, check_eligibility(op, key), kMaxHooks - 1, queue());
    return hook;
  }
  static double call(double number) {
    torch::jit::Stack stack{at::full({2}, number)};
    hook().call(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return stack.back().toTensor().sum().item<double>();
  }
};

TEST_F(CallObserverTest, AMissGoesToTheQueueThatTheHookWasGiven) {
  const int before = queue().asked_classes;
  EXPECT_EQ(call(-3), -2);
  EXPECT_EQ(call(5), 2);
  const std::vector<std::pair<std::string, std::uint64_t>> expected{{"aten::sgn", 1},
                                                                    {"aten::sgn", 2}};
  EXPECT_EQ(queue().missed, expected);
  EXPECT_EQ(queue().asked_classes, before + 1);
}

TEST_F(CallObserverTest, CallsThatNativeIsToAnswerAreTaken) {
  Taker taker(true);
  EXPECT_EQ(call(-3), -2) << "the hook answers: nothing is asked of the taker";
  {
    const InsideGuard inside;
    EXPECT_EQ(call(-3), 7);
  }
  hook().set_active(false);
  EXPECT_EQ(call(-3), 7);
  taker.waits = false;
  EXPECT_EQ(call(-3), -2);
  EXPECT_EQ(taker.calls, 2);
}

TEST_F(CallObserverTest, WhoOnlyLooksLeavesTheCallToNative) {
  const Taker taker(false);
  hook().set_active(false);
  EXPECT_EQ(call(-3), -2);
  EXPECT_EQ(taker.calls, 1);
}

TEST_F(CallObserverTest, TheLastTakerThatWaitsTakesTheCall) {
  hook().set_active(false);
  const Taker first(false);
  {
    Taker last(true);
    EXPECT_EQ(call(-3), 7);
    last.waits = false;
    EXPECT_EQ(call(-3), -2);
    EXPECT_EQ(std::make_pair(first.calls, last.calls), std::make_pair(1, 1));
  }
  EXPECT_EQ(call(-3), -2);
  EXPECT_EQ(first.calls, 2);
}

TEST_F(CallObserverTest, AThreadHasItsOwnTakers) {
  hook().set_active(false);
  Taker taker(true);
  std::thread([&taker] {
    EXPECT_EQ(call(-3), -2);
    taker.detach();  // not this thread's
  }).join();
  EXPECT_EQ(call(-3), 7);
}

}  // namespace
}  // namespace eagercache
