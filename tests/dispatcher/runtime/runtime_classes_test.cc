// Kernels of shape classes on their way, with a compile service of the test.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

class RuntimeClassesTest : public HookTest {
 protected:
  RuntimeClassesTest() { begin(); }
  ~RuntimeClassesTest() override {
    // Nothing is left under way for the next test; what one answer leads to is answered, too.
    for (int i = 0; i < 100 && !runtime().wait_until_idle(0.05); ++i) {
      for (const CompileRequest& request : handler_->requests()) {
        runtime().complete(request.digest, "native", "not faster");
      }
    }
  }

  // From here on nothing is known. A key is compiled at its first call, a class at its second.
  static void begin() {
    Policy policy;
    policy.on_miss = OnMiss::kBackground;
    policy.compile_after = 1;
    policy.shape_classes = true;
    runtime().set_policy(policy);
  }

  static void call_with(at::IntArrayRef sizes) {
    const at::Tensor x = at::ones(sizes);
    EXPECT_TRUE(at::equal(call("eagercache_test::twice", x), x + x));
  }

  static bool is_of_class(const CompileRequest& request) {
    return nlohmann::json::parse(request.call_json).value("kind", "") == "shapes";
  }
  std::ptrdiff_t of_classes() const {
    const std::vector<CompileRequest> requests = handler_->requests();
    return std::count_if(requests.begin(), requests.end(), is_of_class);
  }

  const std::shared_ptr<DiskStore> store_ = use_store();
  OperatorHook& twice_ = hook("eagercache_test::twice");
  const std::shared_ptr<FakeHandler> handler_ = use_handler();
};

TEST_F(RuntimeClassesTest, TheRequestSaysWhichClassIsWanted) {
  call_with({3});
  call_with({4});
  const auto alone = nlohmann::json::parse(handler_->request(0).call_json);
  EXPECT_FALSE(alone.contains("kind"));
  EXPECT_FALSE(alone.contains("again"));
  const CompileRequest request = handler_->request(1);
  const auto of_class = nlohmann::json::parse(request.call_json);
  EXPECT_EQ(of_class["kind"], "shapes");
  EXPECT_EQ(of_class["digest"], request.digest);
  EXPECT_EQ(of_class["op"], "eagercache_test::twice");
  EXPECT_EQ(of_class["pattern"]["symbols"].size(), 1U);
  EXPECT_EQ(of_class["args"][0]["sizes"], nlohmann::json({4}));
}

TEST_F(RuntimeClassesTest, AClassThatGetsNoKernelLeavesTheKeyOnItsOwn) {
  call_with({3});
  call_with({4});
  const CompileRequest request = handler_->request(1);
  ASSERT_TRUE(is_of_class(request));
  runtime().complete(request.digest, "native", "not faster");
  const auto alone = nlohmann::json::parse(handler_->request(2).call_json);
  EXPECT_FALSE(alone.contains("kind"));
  EXPECT_EQ(alone["args"][0]["sizes"], nlohmann::json({4}));
}

// A change of policy forgets that a class's kernel is under way, and the request goes on.
TEST_F(RuntimeClassesTest, AClassUnderWayIsNotAskedForAgainAfterAChangeOfPolicy) {
  call_with({3});
  call_with({4});
  ASSERT_TRUE(is_of_class(handler_->request(1)));
  begin();
  call_with({5});
  call_with({6});  // the same class, of which the runtime knows nothing any more
  call_with({2, 3});
  const auto last = nlohmann::json::parse(handler_->request(3).call_json);
  EXPECT_EQ(last["args"][0]["sizes"], nlohmann::json({2, 3}));
  EXPECT_EQ(of_classes(), 1);
}

}  // namespace
}  // namespace eagercache
