// Hits that native computes too.

#include "dispatcher/observe/verification.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

class VerificationTest : public HookTest {
 protected:
  VerificationTest() { set_verification_share(1.0); }
  ~VerificationTest() override { set_verification_share(0.0); }

  at::Tensor call_twice() const { return call("eagercache_test::twice", x_); }
  EntryState state_now() const { return state(twice_, {x_}); }

  const at::Tensor x_ = at::arange(5, at::kFloat);
  OperatorHook& twice_ = hook("eagercache_test::twice");
};

TEST_F(VerificationTest, AWrongKernelIsPutAsideAndNativesAnswerStands) {
  const auto store = use_store();
  Manifest manifest;
  manifest.key = digest(twice_, {x_});
  manifest.kind = EntryKind::kNative;
  ASSERT_TRUE(store->publish(manifest, {}));
  install(twice_, {x_}, filling_kernel(42));
  const int before = native_runs("twice");
  EXPECT_TRUE(at::equal(call_twice(), x_ + x_));
  EXPECT_EQ(native_runs("twice"), before + 1);
  EXPECT_EQ(state_now(), EntryState::kNative);
  EXPECT_EQ(store->find(manifest.key).code(), StatusCode::kNotFound);
}

TEST_F(VerificationTest, TheServiceHearsOfWhatIsPutAside) {
  class Hears final : public MissHandler {
   public:
    void submit(const CompileRequest& /*request*/) override {}
    void note_put_aside(const std::string& digest, const std::string& reason) noexcept override {
      digests.push_back(digest);
      reasons.push_back(reason);
    }
    void run_blocking(const std::function<bool()>& /*wait*/) override {}

    std::vector<std::string> digests;
    std::vector<std::string> reasons;
  };
  const auto service = std::make_shared<Hears>();
  runtime().set_handler(service);
  install(twice_, {x_}, filling_kernel(42));
  call_twice();
  runtime().set_handler(nullptr);
  ASSERT_EQ(service->digests.size(), 1U);
  EXPECT_EQ(service->digests[0], digest(twice_, {x_}).hex());
  EXPECT_NE(service->reasons[0].find("differed from native's"), std::string::npos);
}

TEST_F(VerificationTest, ARightKernelStays) {
  FakeKernel& right = kernel(1, 1, [](FakeKernel::Inputs inputs, FakeKernel::Outputs outputs) {
    outputs[0] = *inputs[0] + *inputs[0];
    return LoadedKernel::Outcome::kAnswered;
  });
  install(twice_, {x_}, right);
  const int before = native_runs("twice");
  EXPECT_TRUE(at::equal(call_twice(), x_ + x_));
  EXPECT_EQ(right.runs(), 1);
  EXPECT_EQ(native_runs("twice"), before + 1);
  EXPECT_EQ(state_now(), EntryState::kKernel);
}

TEST_F(VerificationTest, AShareOfTheHitsIsChecked) {
  install(twice_, {x_}, kernel(1, 1, [](FakeKernel::Inputs inputs, FakeKernel::Outputs outputs) {
            outputs[0] = *inputs[0] + *inputs[0];
            return LoadedKernel::Outcome::kAnswered;
          }));
  constexpr int kCalls = 4000;
  const auto checked = [&](double share) {
    set_verification_share(share);
    const int before = native_runs("twice");
    for (int i = 0; i < kCalls; ++i) call_twice();
    return native_runs("twice") - before;
  };
  EXPECT_EQ(checked(0.0), 0);
  const int quarter = checked(0.25);
  EXPECT_GT(quarter, kCalls / 4 - 300);
  EXPECT_LT(quarter, kCalls / 4 + 300);
}

TEST(DifferenceFromNative, IsFoundInMetadataAndValues) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const at::Tensor x = at::tensor({1.0, nan, infinity, -0.5}, at::kFloat);
  const auto differs = [&](const at::Tensor& other) {
    return !difference_from_native({other}, {x}, 1).empty();
  };
  EXPECT_FALSE(differs(x.clone()));
  EXPECT_FALSE(differs(x * (1 + 1e-5))) << "rounded otherwise";
  EXPECT_TRUE(differs(x * 1.01));
  EXPECT_TRUE(differs(at::tensor({1.0, 1.0, infinity, -0.5}, at::kFloat)));
  EXPECT_TRUE(differs(at::tensor({1.0, nan, -infinity, -0.5}, at::kFloat)));
  EXPECT_TRUE(differs(x.to(at::kDouble)));
  EXPECT_TRUE(differs(x.view({2, 2})));
  EXPECT_TRUE(differs(at::Tensor()));
  const at::Tensor integers = at::arange(4);
  EXPECT_TRUE(difference_from_native({integers}, {integers.clone()}, 1).empty());
  EXPECT_FALSE(difference_from_native({integers + 1}, {integers}, 1).empty());
}

}  // namespace
}  // namespace eagercache
