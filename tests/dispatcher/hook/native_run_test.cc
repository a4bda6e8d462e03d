// Long runs of calls that are decided for native: most are passed on without a look.

#include <ATen/ATen.h>

#include <thread>

#include "dispatcher/hook/long_run.h"
#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

enum class Form { kBoxed, kUnboxed };

class NativeRunTest : public HookTest, public testing::WithParamInterface<Form> {
 protected:
  NativeRunTest() : known_(at::tensor({1.0F, -2.0F})), other_(at::tensor({3.0F, 5.0F, 7.0F})) {
    set_on_miss(OnMiss::kBackground);
  }

  static void call(const at::Tensor& x) {
    if (GetParam() == Form::kUnboxed) {
      at::abs(x);
      return;
    }
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::abs", "");
    torch::jit::Stack stack{x};
    op.callBoxed(&stack);
  }

  void decide() {
    const Reading reading = read_aten("aten::abs", {known_});
    abs_.table().set_native(reading.words, hash_words(reading.words));
  }

  CallCounts calls_of(const at::Tensor& x, std::uint32_t times) {
    return counted(abs_, [&] {
      for (std::uint32_t i = 0; i < times; ++i) {
        call(x);
      }
    });
  }

  // How many calls of a key that was not met before go by before one is looked at; at most `most`.
  std::uint32_t unseen_calls(std::uint32_t most) {
    for (std::uint32_t i = 0; i < most; ++i) {
      if (count(calls_of(other_, 1), CallOutcome::kMiss) != 0) {
        return i;
      }
    }
    return most;
  }

  OperatorHook& abs_ = hook("aten::abs");
  at::Tensor known_;
  at::Tensor other_;
};

TEST_P(NativeRunTest, EveryCallOfARunIsCounted) {
  decide();
  const CallCounts counts = calls_of(known_, 3 * kLongRun);
  EXPECT_EQ(count(counts, CallOutcome::kNative), 3 * kLongRun);
  EXPECT_EQ(total(counts), 3 * kLongRun);
}

TEST_P(NativeRunTest, BeforeTheRunIsLongEveryCallIsLookedAt) {
  decide();
  calls_of(known_, kLongRun - 1);
  EXPECT_EQ(unseen_calls(kSeenShare), 0U);
}

TEST_P(NativeRunTest, InALongRunANewKeyIsMetAFewCallsLater) {
  decide();
  calls_of(known_, kLongRun + 1);
  EXPECT_EQ(unseen_calls(kSeenShare + 1), kSeenShare - 1);
  // The run is over: the next new key is met at once.
  other_ = at::ones({7});
  EXPECT_EQ(unseen_calls(kSeenShare), 0U);
}

TEST_P(NativeRunTest, WhereAKernelIsKnownItsCallsAreLookedAt) {
  decide();
  install(abs_, {other_}, filling_kernel(9));
  calls_of(known_, 2 * kLongRun);
  const CallCounts counts = calls_of(other_, 40);
  EXPECT_EQ(count(counts, CallOutcome::kHit), 40U);
}

TEST_P(NativeRunTest, WhereAKernelIsKnownLongRunsOfOtherCallsAreNot) {
  decide();
  install(abs_, {other_}, filling_kernel(9));
  const CallCounts counts = calls_of(known_, 3 * kLongRun + 1);
  EXPECT_EQ(count(counts, CallOutcome::kNative), 3 * kLongRun + 1);
  const Reading reading = read_aten("aten::abs", {known_});
  abs_.table().erase(reading.words, hash_words(reading.words));  // met again once it is looked at
  std::swap(known_, other_);
  EXPECT_EQ(unseen_calls(kSeenShare + 1), kSeenShare - 1);
}

// Calls of one sketch and two keys, the second of which has a kernel.
TEST_P(NativeRunTest, AKernelMissesFewCallsOfARunsSketchAndOnlyOnce) {
  decide();
  const at::Tensor unaligned = at::ones({3}).slice(0, 1);
  install(abs_, {unaligned}, filling_kernel(9));
  calls_of(known_, 2 * kLongRun);
  EXPECT_GE(count(calls_of(unaligned, 40), CallOutcome::kHit), 40U - kSeenShare);
  calls_of(known_, 2 * kLongRun);
  EXPECT_EQ(count(calls_of(unaligned, 40), CallOutcome::kHit), 40U);
}

// Calls by turns, of keys that what a thread remembers does not hold side by side.
TEST_P(NativeRunTest, CallsOfTwoKeysMayBeOneRun) {
  const at::Tensor unaligned = at::ones({3}).slice(0, 1);
  for (const at::Tensor& x : {known_, unaligned}) {
    const Reading reading = read_aten("aten::abs", {x});
    abs_.table().set_native(reading.words, hash_words(reading.words));
  }
  install(abs_, {other_}, filling_kernel(9));
  const CallCounts counts = counted(abs_, [&] {
    for (std::uint32_t i = 0; i < 2 * kLongRun + 1; ++i) {
      call(i % 2 == 0 ? known_ : unaligned);
    }
  });
  EXPECT_EQ(count(counts, CallOutcome::kNative), 2 * kLongRun + 1);
  const Reading reading = read_aten("aten::abs", {known_});
  abs_.table().erase(reading.words, hash_words(reading.words));  // met again once it is looked at
  std::swap(known_, other_);
  EXPECT_EQ(unseen_calls(kSeenShare + 1), kSeenShare - 1);
}

TEST_P(NativeRunTest, FrozenKernelsAnswerAllOfTheirCalls) {
  decide();
  const at::Tensor unaligned = at::ones({3}).slice(0, 1);
  install(abs_, {unaligned}, filling_kernel(9));
  calls_of(known_, 2 * kLongRun);
  Runtime::instance().freeze();
  const CallCounts counts = calls_of(unaligned, 40);
  Runtime::instance().thaw();
  EXPECT_EQ(count(counts, CallOutcome::kHit), 40U);
}

TEST_P(NativeRunTest, AKernelThatComesEndsTheRun) {
  decide();
  calls_of(known_, 2 * kLongRun);
  install(abs_, {other_}, filling_kernel(9));
  EXPECT_EQ(count(calls_of(other_, 40), CallOutcome::kHit), 40U);
}

TEST_P(NativeRunTest, AnotherPolicyBeginsAnotherRun) {
  decide();
  calls_of(known_, 2 * kLongRun);
  set_on_miss(OnMiss::kBackground);
  EXPECT_EQ(unseen_calls(kSeenShare), 0U);
}

TEST_P(NativeRunTest, WhoWaitsForKernelsHasEveryCallLookedAt) {
  set_on_miss(OnMiss::kWait);
  decide();
  calls_of(known_, 2 * kLongRun);
  EXPECT_EQ(unseen_calls(kSeenShare), 0U);
}

TEST_P(NativeRunTest, WhereNothingIsCompiledRunsAreLongToo) {
  set_on_miss(OnMiss::kNative);
  decide();
  calls_of(known_, kLongRun + 1);
  EXPECT_EQ(unseen_calls(kSeenShare + 1), kSeenShare - 1);
}

TEST_P(NativeRunTest, ThreadsHaveRunsOfTheirOwn) {
  decide();
  calls_of(known_, 2 * kLongRun);
  std::uint32_t unseen = kSeenShare;
  std::thread([&] { unseen = unseen_calls(kSeenShare); }).join();
  EXPECT_EQ(unseen, 0U);
}

INSTANTIATE_TEST_SUITE_P(Forms, NativeRunTest, testing::Values(Form::kBoxed, Form::kUnboxed),
                         [](const auto& form) {
                           return form.param == Form::kBoxed ? "Boxed" : "Unboxed";
                         });

}  // namespace
}  // namespace eagercache
