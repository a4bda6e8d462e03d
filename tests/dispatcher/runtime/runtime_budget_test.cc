// Which new keys kernels are asked for, with a compile service of the test.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <bit>

#include "dispatcher/runtime/request_budget.h"
#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

constexpr std::size_t kAtOnce = kRequestsAtOnce;
// The few of calls that the machine held up.
constexpr std::size_t kHeldUp = 5;

class RuntimeBudgetTest : public HookTest {
 protected:
  RuntimeBudgetTest() { begin(OnMiss::kBackground); }

  void begin(OnMiss on_miss) { set_on_miss(on_miss, 2); }

  // `count` calls of a size, and what they asked for is answered.
  void call_twice(std::int64_t size, int count) {
    const at::Tensor x = at::ones({size});
    for (int i = 0; i < count; ++i) {
      EXPECT_TRUE(at::equal(call("eagercache_test::twice", x), x + x));
    }
    EXPECT_TRUE(runtime().wait_until_idle(20));
  }

  // Small sizes, each called a few times.
  void call_many(std::int64_t first, std::int64_t count) {
    for (std::int64_t size = first; size < first + count; ++size) {
      call_twice(size, 4);
    }
  }

  std::size_t requests() const { return handler_->requests().size(); }

  const std::shared_ptr<DiskStore> store_ = use_store();
  OperatorHook& twice_ = hook("eagercache_test::twice");
  // Nothing is made, and the key is native's.
  const std::shared_ptr<FakeHandler> handler_ = use_handler([](const CompileRequest& request) {
    runtime().complete(request.digest, "native", "not faster");
  });
};

TEST_F(RuntimeBudgetTest, TheFirstKeysAreAskedForAtOnceAndLaterOnesAreNot) {
  call_many(1, 30);
  EXPECT_EQ(requests(), 30U);
  call_many(31, 70);
  EXPECT_GE(requests(), kAtOnce);
  EXPECT_LE(requests(), kAtOnce + kHeldUp);
}

TEST_F(RuntimeBudgetTest, AKeyThatNativeSpentEnoughOnIsAskedFor) {
  call_many(1, 60);
  const std::size_t before = requests();
  // Two calls that move 64 MB each.
  call_twice(std::int64_t{8} << 20, 2);
  EXPECT_EQ(requests(), before + 1);
  call_twice(1000, 1 << 14);
  EXPECT_EQ(requests(), before + 2);
}

TEST_F(RuntimeBudgetTest, AnotherPolicyBeginsAnew) {
  call_many(1, 60);
  const std::size_t before = requests();
  begin(OnMiss::kBackground);
  call_many(101, 20);
  EXPECT_EQ(requests(), before + 20);
}

TEST_F(RuntimeBudgetTest, WhoWaitsHasAskedForAKernel) {
  begin(OnMiss::kWait);
  call_many(1, 60);
  EXPECT_EQ(requests(), 60U);
}

TEST(RequestBudgetTest, OnAGpuKeysOfStepsThatNeverComeAgainAreNotAskedFor) {
  EXPECT_EQ(enough_calls_of(true, 2, kRequestsAtOnce - 1, 1), 2U);
  const std::uint64_t later = enough_calls_of(true, 2, kRequestsAtOnce, 1);
  EXPECT_GT(later, 49U);  // 24 layers with two norms each, and a last one
  EXPECT_TRUE(std::has_single_bit(later));
  EXPECT_EQ(enough_calls_of(true, 2, kRequestsAtOnce, 1'000'000'000), later);
  EXPECT_EQ(enough_calls_of(true, 512, kRequestsAtOnce, 1), 512U);
}

TEST(RequestBudgetTest, OnTheCpuNativeMustHaveSpentEnough) {
  EXPECT_EQ(enough_calls_of(false, 2, kRequestsAtOnce - 1, 1), 2U);
  EXPECT_EQ(enough_calls_of(false, 2, kRequestsAtOnce, 1000), kSpentNs / 1000);
  EXPECT_EQ(enough_calls_of(false, 2, kRequestsAtOnce, kSpentNs), 2U);
  EXPECT_EQ(enough_calls_of(false, 2, kRequestsAtOnce, 0), kSpentNs);
}

}  // namespace
}  // namespace eagercache
