// Calls from C++, which reach a hook of ATen's operators unboxed.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <unistd.h>

#include "dispatcher/hook/unboxed_hooks.h"
#include "dispatcher/memory/output_allocation.h"
#include "dispatcher/observe/verification.h"
#include "tests/dispatcher/hook_fixture.h"
#include "tests/support/counted_allocations.h"
#include "tests/support/counted_locks.h"

namespace eagercache {
namespace {

using Outcome = LoadedKernel::Outcome;

class UnboxedHookTest : public HookTest {
 protected:
  UnboxedHookTest() : x_(at::tensor({1.0F, -2.0F})), y_(at::tensor({3.0F, 5.0F})) {}

  at::Tensor x_;
  at::Tensor y_;
};

TEST_F(UnboxedHookTest, AKernelAnswersWithATensor) {
  OperatorHook& abs = hook("aten::abs");
  ASSERT_NE(find_unboxed(abs), nullptr);
  install(abs, {x_}, filling_kernel(9));
  at::Tensor answer;
  const CallCounts counts = counted(abs, [&] { answer = at::abs(x_); });
  EXPECT_TRUE(at::equal(answer, at::full({2}, 9.0F)));
  EXPECT_EQ(count(counts, CallOutcome::kHit), 1U);
  EXPECT_EQ(total(counts), 1U);
}

TEST_F(UnboxedHookTest, BoxedAndUnboxedCallersMeetTheSameKey) {
  OperatorHook& abs = hook("aten::abs");
  install(abs, {x_}, filling_kernel(9));
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::abs", "");
  torch::jit::Stack stack{x_};
  const CallCounts counts = counted(abs, [&] { op.callBoxed(&stack); });
  EXPECT_EQ(count(counts, CallOutcome::kHit), 1U);
  EXPECT_TRUE(at::equal(stack.front().toTensor(), at::full({2}, 9.0F)));
}

TEST_F(UnboxedHookTest, SeveralTensorsComeBackInOrder) {
  OperatorHook& norm = hook("aten::native_layer_norm");
  const at::Tensor x = at::ones({2, 4});
  FakeKernel& three = kernel(3, 3, [](auto /*inputs*/, auto outputs) {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      outputs[i] = at::full({1}, static_cast<double>(i));
    }
    return Outcome::kAnswered;
  });
  const at::Tensor w = at::ones({4});
  install(norm, {x, std::vector<std::int64_t>{4}, w, w, 1e-5}, three);
  const auto [a, b, c] = at::native_layer_norm(x, {4}, w, w, 1e-5);
  EXPECT_EQ(three.runs(), 1);
  EXPECT_EQ(a.item<float>(), 0);
  EXPECT_EQ(b.item<float>(), 1);
  EXPECT_EQ(c.item<float>(), 2);
}

TEST_F(UnboxedHookTest, ArgumentsThatAreHandedBackAreTheVeryObjects) {
  OperatorHook& in_place = hook("aten::add_.Tensor");
  FakeKernel& two = kernel(2, 0, [](auto inputs, auto /*outputs*/) {
    inputs[0]->template mutable_data_ptr<float>()[0] = 42;
    return Outcome::kAnswered;
  });
  install(in_place, {x_, y_, 1}, two);
  at::Tensor& answer = x_.add_(y_);
  EXPECT_EQ(&answer, &x_);
  EXPECT_EQ(x_[0].item<float>(), 42);

  OperatorHook& out_form = hook("aten::add.out");
  at::Tensor out = at::zeros({2});
  FakeKernel& three = kernel(3, 0, [](auto inputs, auto /*outputs*/) {
    inputs[2]->template mutable_data_ptr<float>()[1] = 43;
    return Outcome::kAnswered;
  });
  install(out_form, {x_, y_, 1, out}, three);
  EXPECT_EQ(&at::add_out(out, x_, y_), &out);
  EXPECT_EQ(three.runs(), 1);
  EXPECT_EQ(out[1].item<float>(), 43);
}

TEST_F(UnboxedHookTest, ListsGoInAndOut) {
  OperatorHook& abs = hook("aten::_foreach_abs");
  const std::vector<at::Tensor> list{x_, y_};
  FakeKernel& two = kernel(2, 2, [](auto /*inputs*/, auto outputs) {
    outputs[0] = at::full({1}, 1);
    outputs[1] = at::full({1}, 2);
    return Outcome::kAnswered;
  });
  install(abs, {tensor_list(list)}, two);
  const std::vector<at::Tensor> answers = at::_foreach_abs(list);
  ASSERT_EQ(answers.size(), 2U);
  EXPECT_EQ(answers[1].item<std::int64_t>(), 2);
}

TEST_F(UnboxedHookTest, VersionsOfAListAreMovedAsNativeMovesThem) {
  OperatorHook& add = hook("aten::_foreach_add_.Scalar");
  std::vector<at::Tensor> list{x_, y_};
  install(add, {tensor_list(list), 1}, kernel(2, 0, [](auto, auto) { return Outcome::kAnswered; }));
  const auto version = x_._version();
  const CallCounts counts = counted(add, [&] { at::_foreach_add_(list, 1); });
  EXPECT_EQ(count(counts, CallOutcome::kHit), 1U);
  const auto hit_moved = x_._version() - version;
  hooks_answer.store(false);
  const auto before = x_._version();
  at::_foreach_add_(list, 1);
  EXPECT_EQ(x_._version() - before, hit_moved);
}

TEST_F(UnboxedHookTest, ACallWithoutAVerdictIsAMissAndNativeAnswers) {
  OperatorHook& abs = hook("aten::abs");
  const at::Tensor x = at::tensor({1.0F, -2.0F, 3.0F, -4.0F, 5.0F});
  const CallCounts counts = counted(abs, [&] {
    EXPECT_TRUE(at::equal(at::abs(x), at::tensor({1.0F, 2.0F, 3.0F, 4.0F, 5.0F})));
    at::abs(x);
  });
  EXPECT_EQ(count(counts, CallOutcome::kMiss), 1U);
  EXPECT_EQ(total(counts), 2U);
}

TEST_F(UnboxedHookTest, CallsWithoutAVerdictCostNativesAllocationsAndAreCounted) {
  OperatorHook& abs = hook("aten::abs");
  const at::Tensor x = at::tensor({-1.0F, -2.0F, -3.0F, -4.0F, -5.0F, -6.0F});
  set_on_miss(OnMiss::kBackground, 40);
  const auto store = use_store();
  const auto handler = use_handler([](const CompileRequest& request) {
    runtime().complete(request.digest, "native", "of the test");
  });
  std::size_t before = thread_allocations();
  hooks_answer.store(false);
  at::abs(x);
  hooks_answer.store(true);
  const std::size_t native = thread_allocations() - before;
  at::abs(x);
  at::abs(x);
  const CallCounts counts = counted(abs, [&] {
    before = thread_allocations();
    for (int i = 0; i < 30; ++i) {
      at::abs(x);
    }
    EXPECT_EQ(thread_allocations() - before, 30 * native);
  });
  EXPECT_EQ(count(counts, CallOutcome::kPending), 30U);
  EXPECT_EQ(total(counts), 30U);
  EXPECT_TRUE(handler->requests().empty());
  // What the others were counted for: the fortieth asks.
  for (int i = 0; i < 8; ++i) {
    at::abs(x);
  }
  EXPECT_NE(handler->request(0).call_json.find("\"calls\":40"), std::string::npos)
      << handler->request(0).call_json;
}

TEST_F(UnboxedHookTest, DecidedNativeAndSteppedAsideCallsCountOnce) {
  OperatorHook& abs = hook("aten::abs");
  const at::Tensor x = at::tensor({1.0F, -2.0F, 3.0F});
  at::abs(x);
  CallView view;
  const torch::jit::Stack stack{x};
  ASSERT_EQ(abs.read_call(stack, view), AsideReason::kNone);
  abs.table().set_native(view.key.words(), hash_words(view.key.words()));
  const CallCounts counts = counted(abs, [&] {
    EXPECT_EQ(at::abs(x)[1].item<float>(), 2);
    at::abs(at::zeros({0}));
  });
  EXPECT_EQ(count(counts, CallOutcome::kNative), 1U);
  EXPECT_EQ(count(counts, CallOutcome::kAside), 1U);
  EXPECT_EQ(total(counts), 2U);
}

TEST_F(UnboxedHookTest, AKernelThatFailsIsFollowedByNativeAndNotAskedAgain) {
  OperatorHook& abs = hook("aten::abs");
  const at::Tensor x = at::tensor({-1.0F, -2.0F, -3.0F, -4.0F});
  FakeKernel& failing = kernel(1, 1, [](auto, auto) { return Outcome::kFailed; });
  install(abs, {x}, failing);
  EXPECT_EQ(at::abs(x)[3].item<float>(), 4);
  EXPECT_EQ(at::abs(x)[3].item<float>(), 4);
  EXPECT_EQ(failing.runs(), 1);
}

// From a thread's second call on the key is one that it remembers.
TEST_F(UnboxedHookTest, AKernelThatFailsLaterIsNotAskedAgainEither) {
  OperatorHook& abs = hook("aten::abs");
  const at::Tensor x = at::tensor({-1.0F, -2.0F, -3.0F});
  int runs = 0;
  install(abs, {x}, kernel(1, 1, [&](auto, auto outputs) {
            outputs[0] = at::full({3}, 9.0F);
            return ++runs < 3 ? Outcome::kAnswered : Outcome::kFailed;
          }));
  EXPECT_EQ(at::abs(x)[2].item<float>(), 9);
  EXPECT_EQ(at::abs(x)[2].item<float>(), 9);
  EXPECT_EQ(at::abs(x)[2].item<float>(), 3);
  EXPECT_EQ(at::abs(x)[2].item<float>(), 3);
  EXPECT_EQ(runs, 3);
}

TEST_F(UnboxedHookTest, AKeyThatTheTableForgotIsNotRemembered) {
  OperatorHook& abs = hook("aten::abs");
  install(abs, {x_}, filling_kernel(9));
  EXPECT_EQ(at::abs(x_)[0].item<float>(), 9);
  EXPECT_EQ(at::abs(x_)[0].item<float>(), 9);
  abs.table().clear();
  const CallCounts counts = counted(abs, [&] { EXPECT_EQ(at::abs(x_)[0].item<float>(), 1); });
  EXPECT_EQ(count(counts, CallOutcome::kMiss), 1U);
  install(abs, {x_}, filling_kernel(7));
  EXPECT_EQ(at::abs(x_)[0].item<float>(), 7);
  EXPECT_EQ(at::abs(x_)[0].item<float>(), 7);
}

TEST_F(UnboxedHookTest, AVerdictThatChangesHoldsFromTheNextCallOn) {
  OperatorHook& abs = hook("aten::abs");
  install(abs, {x_}, filling_kernel(9));
  at::abs(x_);
  install(abs, {x_}, filling_kernel(8));
  EXPECT_EQ(at::abs(x_)[0].item<float>(), 8);
  const Reading reading = read_aten("aten::abs", {x_});
  abs.table().set_native(reading.words, hash_words(reading.words));
  EXPECT_EQ(at::abs(x_)[0].item<float>(), 1);
}

// Calls that share sizes and dtype of their first tensor with one that the thread remembers.
TEST_F(UnboxedHookTest, WhatDiffersFromARememberedCallIsAnotherKey) {
  OperatorHook& add = hook("aten::add.Tensor");
  install(add, {x_, y_, 1}, kernel(2, 1, [](auto, auto outputs) {
            outputs[0] = at::full({2}, 9.0F);
            return Outcome::kAnswered;
          }));
  const auto hits_of = [&](const at::Tensor& x, const at::Tensor& y, const at::Scalar& alpha) {
    at::add(x_, y_);
    EXPECT_EQ(at::add(x_, y_)[0].item<float>(), 9);
    const CallCounts counts = counted(add, [&] { at::add(x, y, alpha); });
    EXPECT_EQ(total(counts), 1U);
    return count(counts, CallOutcome::kHit);
  };
  EXPECT_EQ(hits_of(y_, x_, 1), 1U);
  EXPECT_EQ(hits_of(x_, y_, 2), 0U);
  EXPECT_EQ(hits_of(x_, y_, 1.0), 0U);
  EXPECT_EQ(hits_of(x_, y_.to(at::kDouble), 1), 0U);
  EXPECT_EQ(hits_of(x_, y_.unsqueeze(0), 1), 0U);
  EXPECT_EQ(hits_of(x_, at::ones({4}).slice(0, 0, 4, 2), 1), 0U);
  EXPECT_EQ(hits_of(x_, at::ones({3}).slice(0, 1, 3), 1), 0U);
  at::set_num_threads(at::get_num_threads() + 1);
  EXPECT_EQ(count(counted(add, [&] { at::add(x_, y_); }), CallOutcome::kHit), 0U);
  at::set_num_threads(at::get_num_threads() - 1);
}

TEST_F(UnboxedHookTest, ARememberedCallStepsAsideWhereItsMemoryOverlaps) {
  OperatorHook& add = hook("aten::add_.Tensor");
  FakeKernel& two = kernel(2, 0, [](auto, auto) { return Outcome::kAnswered; });
  const at::Tensor memory = at::zeros({64});
  at::Tensor first = memory.slice(0, 0, 16);
  const at::Tensor far = memory.slice(0, 32, 48);
  install(add, {first, far, 1}, two);
  first.add_(far);
  const CallCounts apart = counted(add, [&] { first.add_(far); });
  EXPECT_EQ(count(apart, CallOutcome::kHit), 1U);
  at::Tensor shifted = memory.slice(0, 16, 32);
  const at::Tensor across = at::from_blob(memory.data_ptr<float>() + 16, {16});
  const CallCounts together = counted(add, [&] { shifted.add_(across); });
  EXPECT_EQ(together.aside[static_cast<std::size_t>(AsideReason::kOverlap)], 1U);
  EXPECT_EQ(two.runs(), 2);
}

// A wrong kernel is found within so many calls but once in 170,000 runs; were the share drawn
// twice, nine runs in ten would not find it.
TEST_F(UnboxedHookTest, AShareOfTheHitsIsCheckedAndDrawnOnce) {
  OperatorHook& abs = hook("aten::abs");
  const at::Tensor x = at::tensor({-1.0F, -2.0F, -3.0F, -4.0F, -5.0F, -6.0F});
  install(abs, {x}, filling_kernel(9));
  set_verification_share(0.01);
  for (int i = 0; i < 1200; ++i) {
    at::abs(x);
  }
  set_verification_share(0);
  EXPECT_EQ(state(abs, {x}), EntryState::kNative);
}

// Makes its output as a bare kernel does.
class Allocating final : public LoadedKernel {
 public:
  explicit Allocating(std::int64_t elements) : spec_(at::kFloat, {elements}, {1}) {}
  Outcome run(std::span<const at::Tensor* const> /*inputs*/, std::span<at::Tensor> outputs,
              c10::Device /*device*/) noexcept override {
    outputs[0] = spec_.allocate();
    return Outcome::kAnswered;
  }
  std::size_t num_inputs() const noexcept override { return 1; }
  std::size_t num_outputs() const noexcept override { return 1; }
  const OutputSpec& spec() const noexcept { return spec_; }

 private:
  const OutputSpec spec_;
};

// The version counter; the tensor, its storage and bytes are blocks that the thread keeps.
TEST_F(UnboxedHookTest, AHitAllocatesNothingButItsOutputs) {
  OperatorHook& abs = hook("aten::abs");
  const at::Tensor x = at::tensor({-1.0F, -2.0F, -3.0F, -4.0F, -5.0F, -6.0F, -7.0F});
  auto& kernel = *new Allocating(7);
  install(abs, {x}, kernel);
  at::abs(x);
  std::size_t before = thread_allocations();
  kernel.spec().allocate();
  const std::size_t own = thread_allocations() - before;
  EXPECT_EQ(own, 1U);
  before = thread_allocations();
  for (int i = 0; i < 10; ++i) {
    at::abs(x);
  }
  EXPECT_EQ(thread_allocations() - before, 10 * own);
}

TEST_F(UnboxedHookTest, AHitTakesNoLock) {
  OperatorHook& abs = hook("aten::abs");
  const at::Tensor x = at::ones({8});
  install(abs, {x}, *new Allocating(8));
  at::abs(x);
  const std::size_t before = thread_locks();
  const CallCounts counts = counted(abs, [&] {
    for (int i = 0; i < 100; ++i) {
      at::abs(x);
    }
  });
  // What reads the counters takes some of its own, as many for no call.
  const std::size_t taken = thread_locks() - before;
  const std::size_t again = thread_locks();
  counted(abs, [] {});
  EXPECT_EQ(taken, thread_locks() - again);
  EXPECT_EQ(count(counts, CallOutcome::kHit), 100U);
  EXPECT_GT(taken, 0U) << "locks are not counted";
}

TEST_F(UnboxedHookTest, AHitMakesNoSystemCall) {
  OperatorHook& abs = hook("aten::abs");
  const at::Tensor x = at::ones({9});
  install(abs, {x}, *new Allocating(9));
  const CallCounts counts = counted(abs, [&] {
    EXPECT_TRUE(makes_no_system_call([&] { at::abs(x); },
                                     [&] {
                                       for (int i = 0; i < 100; ++i) {
                                         at::abs(x);
                                       }
                                     }));
  });
  EXPECT_EQ(count(counts, CallOutcome::kHit), 101U);
  EXPECT_FALSE(makes_no_system_call([] {}, [] { getppid(); }));
}

TEST_F(UnboxedHookTest, NativeErrorsAreNatives) {
  OperatorHook& add = hook("aten::add.Tensor");
  static_cast<void>(add);
  EXPECT_THROW(at::add(at::zeros({2}), at::zeros({3})), c10::Error);
}

}  // namespace
}  // namespace eagercache
