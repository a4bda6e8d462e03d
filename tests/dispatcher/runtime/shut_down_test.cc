// The end of a process: an executable of its own, for the runtime does not come back.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <future>
#include <vector>

#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

class ShutDownTest : public HookTest {};

TEST_F(ShutDownTest, LetsWaitingCallersGoWithNativesResultAndLeavesEverythingNative) {
  OperatorHook& twice = hook("eagercache_test::twice");
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kWait);
  std::vector<std::future<at::Tensor>> waiting;
  for (std::int64_t size = 1; size <= 3; ++size) {
    waiting.push_back(std::async(
        std::launch::async, [size] { return call("eagercache_test::twice", at::ones({size})); }));
  }
  handler->request(2);
  runtime().shut_down();
  for (auto& each : waiting) {
    ASSERT_EQ(each.wait_for(std::chrono::seconds(20)), std::future_status::ready);
    EXPECT_EQ(each.get()[0].item<double>(), 2.0);
  }
  EXPECT_EQ(runtime().outstanding(), 0U);

  const CallCounts counts = counted(twice, [&] {
    EXPECT_EQ(call("eagercache_test::twice", at::ones({9}))[0].item<double>(), 2.0);
  });
  EXPECT_EQ(total(counts), 0U) << "hooks do not answer";
  runtime().complete(handler->requests()[0].digest, "native", "too late");
  runtime().shut_down();

  // A late call that still meets an answering hook neither waits nor queues.
  runtime().set_handler(handler);
  runtime().set_answering(true);
  EXPECT_EQ(call("eagercache_test::twice", at::ones({10}))[0].item<double>(), 2.0);
  EXPECT_EQ(runtime().outstanding(), 0U);
}

}  // namespace
}  // namespace eagercache
