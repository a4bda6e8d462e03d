// The public C++ interface over kernels that were compiled: make_store.py's.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "eagercache/eagercache.h"
#include "tests/support/temporary_directory.h"

namespace eagercache {
namespace {

class CppApiTest : public testing::Test {
 protected:
  CppApiTest() {
    ::unsetenv("EAGERCACHE_DIR");
    options_.store = EAGERCACHE_TEST_STORE;
    options_.always = true;
    at::manual_seed(7);
    x_ = at::rand({512, 512});
    expected_ = var();
  }

  at::Tensor var() const {
    return at::var(x_, at::IntArrayRef{1}, at::Scalar(1), /*keepdim=*/false);
  }
  void expect_var() const { EXPECT_TRUE(at::allclose(var(), expected_, 1e-5, 1e-5)); }

  // What became of the calls of var.
  static OperatorStatistics counts() {
    for (OperatorStatistics& row : statistics().operators) {
      if (row.op == "aten::var.correction") return row;
    }
    return {};
  }
  void expect_refusal(const std::string& code, const std::string& text) const {
    const EnableResult result = enable(options_);
    EXPECT_FALSE(result);
    EXPECT_EQ(result.code, code) << result.reason;
    EXPECT_NE(result.reason.find(text), std::string::npos) << result.reason;
    EXPECT_EQ(result.reason.find('\n'), std::string::npos);
  }

  EnableOptions options_;
  at::Tensor x_;
  at::Tensor expected_;
};

TEST_F(CppApiTest, EveryCallHits) {
  const EnableResult result = enable(options_);
  ASSERT_TRUE(result) << result.reason;
  EXPECT_EQ(result.kernels, 2U);
  EXPECT_EQ(result.environment.size(), 16U);
  EXPECT_EQ(result.operators,
            (std::vector<std::string>{"aten::aminmax at CPU", "aten::var.correction at CPU"}));
  for (int i = 0; i < 3; ++i) expect_var();
  EXPECT_EQ(counts().hits, 3U);
  EXPECT_EQ(statistics().hits, 3U);
  EXPECT_EQ(statistics().kernels_loaded, 1U);
  ASSERT_EQ(verdicts().size(), 1U);
  EXPECT_EQ(verdicts()[0].decision, "kernel");
}

TEST_F(CppApiTest, PreloadedKernelsHitInEveryThread) {
  options_.preload = true;
  ASSERT_TRUE(enable(options_));
  EXPECT_EQ(statistics().kernels_loaded, 2U);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([this] {
      for (int n = 0; n < 25; ++n) expect_var();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counts().hits, 100U);
}

TEST_F(CppApiTest, NativeAnswersWhileAThreadLoads) {
  options_.load_in_background = true;
  ASSERT_TRUE(enable(options_));
  expect_var();
  EXPECT_EQ(counts().misses, 1U);
  ASSERT_TRUE(wait_until_loaded(60));
  expect_var();
  EXPECT_EQ(counts().hits, 1U);
  // What the store does not have is decided once, and stays native.
  const at::Tensor other = x_.slice(0, 0, 100);
  at::var(other, at::IntArrayRef{1}, at::Scalar(1), false);
  ASSERT_TRUE(wait_until_loaded(60));
  at::var(other, at::IntArrayRef{1}, at::Scalar(1), false);
  EXPECT_EQ(counts().native, 1U);
}

TEST_F(CppApiTest, NamedOperatorsAreHookedAndOthersAreNot) {
  options_.operators = {"aten::var"};
  options_.skip = {"aten::var.dim"};
  EnableResult result = enable(options_);
  ASSERT_TRUE(result) << result.reason;
  for (const std::string& op : result.operators) EXPECT_EQ(op.find("aten::var"), 0U) << op;
  at::aminmax(x_, 1, false);
  expect_var();
  EXPECT_EQ(statistics().hits, 1U);
  // The newest call holds.
  options_.operators = {};
  options_.skip = {"var.correction"};
  result = enable(options_);
  EXPECT_EQ(result.left_out, std::vector<std::string>{"aten::var.correction at CPU: skipped"});
  expect_var();
  at::aminmax(x_, 1, false);
  EXPECT_EQ(statistics().hits, 2U);
  EXPECT_EQ(counts().hits, 1U);
}

TEST_F(CppApiTest, WhatCannotBeUsedIsRefusedAndChangesNothing) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(enable(options_));
  const EnableOptions good = options_;
  options_.operators = {"aten::no_such_operator"};
  expect_refusal("invalid_argument", "there is no operator aten::no_such_operator");
  options_.operators = {"aten::mm"};
  expect_refusal("invalid_argument", "cannot be accelerated: it is a library call");
  options_ = good;
  options_.store = directory.path() / "nothing";
  expect_refusal("not_found", "there is no store");
  options_.store.clear();
  expect_refusal("invalid_argument", "no store is named");
  options_ = good;
  options_.environment = "0123456789abcdef";
  expect_refusal("not_found", "has no environment 0123456789abcdef");
  options_ = good;
  options_.bundle = directory.path() / "no.bundle";
  expect_refusal("invalid_argument", "no key is trusted");
  options_.read_only = true;
  expect_refusal("invalid_argument", "read_only");
  const BundleCheck check = check_bundle(options_.bundle, {directory.path() / "no.pub"});
  EXPECT_FALSE(check);
  EXPECT_NE(check.reason.find("no.pub"), std::string::npos) << check.reason;
  expect_var();
  EXPECT_EQ(counts().hits, 1U) << "the first enable() holds";
}

TEST_F(CppApiTest, AReadOnlyStoreHits) {
  options_.read_only = true;
  ASSERT_TRUE(enable(options_));
  options_.environment = enable(options_).environment;
  ASSERT_TRUE(enable(options_));
  expect_var();
  EXPECT_EQ(counts().hits, 1U);
}

TEST_F(CppApiTest, ATierHitsWhereTheStoreIsEmpty) {
  const TemporaryDirectory directory;
  options_.store = directory.path() / "own";
  ::setenv("EAGERCACHE_TIERS", EAGERCACHE_TEST_STORE, 1);
  const EnableResult result = enable(options_);
  ASSERT_TRUE(result) << result.reason;
  expect_var();
  EXPECT_EQ(counts().hits, 0U) << "hooked are the operators of the store's own kernels";
  options_.operators = {"aten::var.correction"};
  ASSERT_TRUE(enable(options_));
  expect_var();
  EXPECT_EQ(counts().hits, 1U);
}

TEST_F(CppApiTest, DisableAndShutDownLeaveEverythingNative) {
  ASSERT_TRUE(enable(options_));
  disable();
  expect_var();
  EXPECT_EQ(counts().hits, 0U);
  ASSERT_TRUE(enable(options_));
  expect_var();
  EXPECT_EQ(counts().hits, 1U);
  shut_down();
  expect_var();
  EXPECT_EQ(counts().hits, 1U);
  expect_refusal("unsupported", "shut_down()");
  EXPECT_NE(running_environment().find("torch.record: "), std::string::npos);
}

}  // namespace
}  // namespace eagercache
