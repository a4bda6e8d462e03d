// Operators that are not ATen's.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <stdexcept>

#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

class CustomOperatorTest : public HookTest {
 protected:
  const at::Tensor x_ = at::ones({4});
};

TEST_F(CustomOperatorTest, CanBeHookedAndAnsweredByAKernel) {
  OperatorHook& twice = hook("eagercache_test::twice");
  install(twice, {x_}, filling_kernel(42));
  const int before = native_runs("twice");
  EXPECT_EQ(call("eagercache_test::twice", x_).sum().item<double>(), 4 * 42.0);
  EXPECT_EQ(native_runs("twice"), before);
  EXPECT_EQ(call("eagercache_test::twice", at::ones({3})).sum().item<double>(), 6.0);
  EXPECT_EQ(native_runs("twice"), before + 1);
}

TEST_F(CustomOperatorTest, ErrorsOfItsOwnFunctionPassThroughAndLeaveNoRequest) {
  OperatorHook& refuse = hook("eagercache_test::refuse");
  use_store();
  const auto handler = use_handler();
  for (const OnMiss on_miss : {OnMiss::kBackground, OnMiss::kWait, OnMiss::kNative}) {
    set_on_miss(on_miss, 1);
    const CallCounts counts = counted(refuse, [&] {
      try {
        call("eagercache_test::refuse", x_);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::invalid_argument& error) {
        EXPECT_STREQ(error.what(), "refused by native");
      }
    });
    EXPECT_EQ(total(counts), 1U);
    EXPECT_TRUE(runtime().wait_until_idle(10));
    EXPECT_TRUE(handler->requests().empty());
  }
}

TEST_F(CustomOperatorTest, OperatorsInsideItsOwnFunctionAreHookedAsEver) {
  hook("eagercache_test::inner");
  OperatorHook& twice = hook("eagercache_test::twice");
  install(twice, {x_}, filling_kernel(42));
  const CallCounts counts = counted(
      twice, [&] { EXPECT_EQ(call("eagercache_test::inner", x_)[0].item<double>(), 42.0); });
  EXPECT_EQ(count(counts, CallOutcome::kHit), 1U);
}

TEST_F(CustomOperatorTest, AutocastChangesWhatItsOwnFunctionComputes) {
  OperatorHook& twice = hook("eagercache_test::twice");
  install(twice, {x_}, filling_kernel(42));
  const auto under = [&](bool enabled, at::ScalarType dtype) {
    const auto before = at::autocast::get_autocast_dtype(at::kCPU);
    at::autocast::set_autocast_enabled(at::kCPU, enabled);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    const double answer = call("eagercache_test::twice", x_)[0].item<double>();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_dtype(at::kCPU, before);
    return answer;
  };
  EXPECT_EQ(under(true, at::kBFloat16), 2.0) << "the kernel of a call without autocast";
  EXPECT_EQ(under(true, at::kHalf), 2.0);
  EXPECT_EQ(under(false, at::kHalf), 42.0);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  install(twice, {x_}, filling_kernel(43));
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(under(true, at::kBFloat16), 43.0);
  EXPECT_EQ(under(true, at::kHalf), 2.0) << "autocast to another dtype";
  EXPECT_EQ(under(false, at::kBFloat16), 42.0);
}

TEST_F(CustomOperatorTest, TheFunctionsIdentityIsInTheStoresKey) {
  OperatorHook& twice = hook("eagercache_test::twice");
  const std::vector<Word> words{1, 2, 3};
  const Digest without = twice.entry_digest(words, "faster");
  runtime().set_identity(twice, "one");
  EXPECT_TRUE(twice.is_function());
  const Digest one = twice.entry_digest(words, "faster");
  EXPECT_NE(one, without);
  install(twice, {x_}, filling_kernel(42));
  EXPECT_EQ(call("eagercache_test::twice", x_)[0].item<double>(), 42.0);
  const std::uint64_t generation = runtime().generation();
  runtime().set_identity(twice, "two");
  EXPECT_NE(twice.entry_digest(words, "faster"), one);
  EXPECT_NE(runtime().generation(), generation) << "what is under way must not be installed";
  EXPECT_EQ(call("eagercache_test::twice", x_)[0].item<double>(), 2.0)
      << "the kernel of the function before";
  runtime().set_identity(twice, "");
}

TEST_F(CustomOperatorTest, ARegistrationOverOursIsSeen) {
  // Kept for ever, as the hook is.
  static auto* library = new torch::Library(torch::Library::FRAGMENT, "eagercache_shadow_test",
                                            std::nullopt, __FILE__, __LINE__);
  library->def("op(Tensor x) -> Tensor");
  library->impl(
      "op", torch::dispatch(
                c10::DispatchKey::CPU, +[](const at::Tensor& x) -> at::Tensor { return x + 1; }));
  OperatorHook& ours = hook("eagercache_shadow_test::op");
  EXPECT_FALSE(ours.is_shadowed());
  {
    torch::Library other(torch::Library::IMPL, "eagercache_shadow_test", c10::DispatchKey::CPU,
                         __FILE__, __LINE__);
    other.impl(
        "op", +[](const at::Tensor& x) -> at::Tensor { return x + 2; });
    EXPECT_TRUE(ours.is_shadowed());
    const CallCounts counts = counted(
        ours, [&] { EXPECT_EQ(call("eagercache_shadow_test::op", x_)[0].item<double>(), 3.0); });
    EXPECT_EQ(total(counts), 0U);
  }
  EXPECT_FALSE(ours.is_shadowed()) << "the other registration is gone";
  EXPECT_EQ(call("eagercache_shadow_test::op", x_)[0].item<double>(), 2.0);
  ours.set_active(false);
}

}  // namespace
}  // namespace eagercache
