// From a missed call to a verdict, with a compile service of the test.

#include <ATen/ATen.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <exception>
#include <future>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "tests/dispatcher/hook_fixture.h"
#include "tests/dispatcher/restored_globals.h"

namespace eagercache {
namespace {

class RuntimeMissTest : public HookTest {
 protected:
  at::Tensor call_twice(const at::Tensor& x) const { return call("eagercache_test::twice", x); }
  at::Tensor call_twice() const { return call_twice(x_); }
  EntryState state_now() const { return state(twice_, {x_}); }
  std::string digest_now() const { return digest(twice_, {x_}).hex(); }

  // The newest verdict about x_.
  VerdictRecord verdict() const {
    for (const VerdictRecord& each : runtime().verdicts(twice_)) {
      if (each.digest == digest_now()) {
        return each;
      }
    }
    return {};
  }

  Manifest decision(EntryKind kind, const std::string& reason) const {
    Manifest manifest;
    manifest.key = digest(twice_, {x_});
    manifest.kind = kind;
    manifest.facts["reason"] = reason;
    return manifest;
  }

  static bool idle() { return runtime().wait_until_idle(20); }

  const at::Tensor x_ = at::ones({5});
  OperatorHook& twice_ = hook("eagercache_test::twice");
};

TEST_F(RuntimeMissTest, NativeHasAnsweredBeforeAKeyIsSubmitted) {
  use_store();
  const int before = native_runs("twice");
  std::atomic<int> runs_at_submit{0};
  const auto handler =
      use_handler([&](const CompileRequest&) { runs_at_submit = native_runs("twice"); });
  set_on_miss(OnMiss::kBackground, 1);
  EXPECT_TRUE(at::equal(call_twice(), x_ + x_));
  handler->request(0);
  EXPECT_EQ(runs_at_submit.load(), before + 1);
  runtime().complete(digest_now(), "native", "not faster");
  EXPECT_TRUE(idle());
}

TEST_F(RuntimeMissTest, TheLoaderDoesNotTakeTheProcessorFromWhoWakesIt) {
  use_store();
  std::atomic<int> policy{-1};
  const auto handler = use_handler([&](const CompileRequest&) { policy = sched_getscheduler(0); });
  set_on_miss(OnMiss::kBackground, 1);
  call_twice();
  handler->request(0);
  EXPECT_EQ(policy.load(), SCHED_BATCH);
  runtime().complete(digest_now(), "native", "not faster");
  EXPECT_TRUE(idle());
}

TEST_F(RuntimeMissTest, ARequestDescribesTheCall) {
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kBackground, 1);
  call_twice();
  const CompileRequest request = handler->request(0);
  EXPECT_EQ(request.digest, digest_now());
  const auto call = nlohmann::json::parse(request.call_json);
  EXPECT_EQ(call["op"], "eagercache_test::twice");
  EXPECT_EQ(call["overload"], "");
  EXPECT_EQ(call["dispatch_key"], "CPU");
  EXPECT_EQ(call["digest"], request.digest);
  EXPECT_EQ(call["calls"], 1);
  ASSERT_EQ(call["args"].size(), 1U);
  EXPECT_EQ(call["args"][0]["name"], "x");
  EXPECT_EQ(call["args"][0]["sizes"], nlohmann::json::array({5}));
  runtime().complete(request.digest, "native", "");
  EXPECT_TRUE(idle());
}

TEST_F(RuntimeMissTest, WhatNoiseHidIsAskedForAgainAndNobodyWaits) {
  const auto store = use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kBackground, 1);
  Manifest undecided = decision(EntryKind::kNative, "undecided");
  const auto publish = [&](const char* measured) {
    undecided.facts["measured"] = measured;
    (void)store->remove(undecided.key);  // the first time there is none
    EXPECT_TRUE(store->publish(undecided, {}));
  };
  publish("1");
  call_twice();
  const CompileRequest request = handler->request(0);
  EXPECT_TRUE(idle());
  EXPECT_EQ(state_now(), EntryState::kNative);
  EXPECT_EQ(request.digest, digest_now());
  EXPECT_EQ(nlohmann::json::parse(request.call_json)["again"], 1);

  publish("2");
  runtime().complete(request.digest, "native", "undecided");
  EXPECT_EQ(nlohmann::json::parse(handler->request(1).call_json)["again"], 2);

  publish("3");
  runtime().complete(request.digest, "native", "undecided");
  EXPECT_TRUE(idle());
  EXPECT_EQ(verdict().facts["measured"], "3");
  EXPECT_EQ(handler->requests().size(), 2U);
}

TEST_F(RuntimeMissTest, WhatCouldNotBeMeasuredAgainIsLeft) {
  const auto store = use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kBackground, 1);
  Manifest undecided = decision(EntryKind::kNative, "undecided");
  undecided.facts["measured"] = "1";
  ASSERT_TRUE(store->publish(undecided, {}));
  call_twice();
  const CompileRequest request = handler->request(0);
  runtime().complete(request.digest, "failed", "no worker");
  EXPECT_TRUE(idle());
  EXPECT_EQ(state_now(), EntryState::kNative);
  EXPECT_EQ(handler->requests().size(), 1U);
}

TEST_F(RuntimeMissTest, AMeasurementThatDecidesIsInstalled) {
  const auto store = use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kBackground, 1);
  Manifest undecided = decision(EntryKind::kNative, "undecided");
  undecided.facts["measured"] = "2";
  ASSERT_TRUE(store->publish(undecided, {}));
  call_twice();
  const CompileRequest request = handler->request(0);
  ASSERT_TRUE(store->remove(undecided.key));
  ASSERT_TRUE(store->publish(decision(EntryKind::kNative, "slower"), {}));
  runtime().complete(request.digest, "native", "slower");
  EXPECT_EQ(verdict().reason, "slower");
  EXPECT_TRUE(idle());
  EXPECT_EQ(handler->requests().size(), 1U);
}

// The kernel itself cannot be loaded here: what is asked for goes by the entry's fact alone.
TEST_F(RuntimeMissTest, ASearchThatIsDueIsAskedForOnceAndWhatItFindsIsInstalled) {
  const auto store = use_store();
  const auto handler = use_handler();
  for (const bool found : {false, true}) {
    set_on_miss(OnMiss::kBackground, 1);
    Manifest first = decision(EntryKind::kNative, "slower");
    first.facts["search"] = "due";
    (void)store->remove(first.key);
    ASSERT_TRUE(store->publish(first, {}));
    call_twice();
    const CompileRequest request = handler->request(found ? 1 : 0);
    EXPECT_TRUE(idle());
    EXPECT_EQ(nlohmann::json::parse(request.call_json)["again"], "search");
    if (found) {
      ASSERT_TRUE(store->remove(first.key));
      first.facts = {{"reason", "slower in every form"}, {"search", "done"}};
      ASSERT_TRUE(store->publish(first, {}));
    }
    runtime().complete(request.digest, "failed", "");
    EXPECT_EQ(verdict().reason, found ? "slower in every form" : "slower");
    EXPECT_EQ(handler->requests().size(), found ? 2U : 1U);
  }
}

TEST_F(RuntimeMissTest, EightThreadsThatMissOneKeySubmitItOnce) {
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kBackground, 2);
  constexpr int kThreads = 8;
  constexpr int kCalls = 50;
  const int before = native_runs("twice");
  const CallCounts counts = counted(twice_, [&] {
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        for (int n = 0; n < kCalls; ++n) {
          EXPECT_EQ(call_twice().sum().item<double>(), 10.0);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
  EXPECT_EQ(native_runs("twice"), before + kThreads * kCalls);
  handler->request(0);
  runtime().complete(digest_now(), "native", "not faster");
  EXPECT_TRUE(idle());
  EXPECT_EQ(handler->requests().size(), 1U);
  EXPECT_EQ(count(counts, CallOutcome::kMiss), 1U);
  EXPECT_EQ(count(counts, CallOutcome::kPending), kThreads * kCalls - 1U);
}

TEST_F(RuntimeMissTest, AKeyIsSubmittedAtTheThresholdAndNotBefore) {
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kBackground, 3);
  for (int i = 0; i < 2; ++i) {
    call_twice();
    ASSERT_TRUE(idle());
    EXPECT_TRUE(handler->requests().empty());
  }
  call_twice();
  EXPECT_EQ(handler->request(0).digest, digest_now());
  runtime().complete(digest_now(), "native", "");
  ASSERT_TRUE(idle());
  call_twice();
  EXPECT_TRUE(idle());
  EXPECT_EQ(handler->requests().size(), 1U);
}

TEST_F(RuntimeMissTest, KeysOfAnOperatorThatIsDearToCompileWaitForMoreCalls) {
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kBackground, 2);
  call_twice();
  call_twice();
  EXPECT_EQ(handler->request(0).digest, digest_now());
  runtime().complete(digest_now(), "native", "", 9.0);  // four times what is usual
  const at::Tensor other = at::ones({6});
  for (int i = 0; i < 7; ++i) {
    call_twice(other);
    ASSERT_TRUE(idle());
    ASSERT_EQ(handler->requests().size(), 1U);
  }
  call_twice(other);
  runtime().complete(handler->request(1).digest, "native", "", 1.0);
  EXPECT_TRUE(idle());
}

TEST_F(RuntimeMissTest, KeysOfTwoShapesAreSubmittedBoth) {
  use_store();
  const auto handler = use_handler(
      [](const CompileRequest& request) { runtime().complete(request.digest, "native", ""); });
  set_on_miss(OnMiss::kBackground, 1);
  call_twice();
  call_twice(at::ones({6}));
  ASSERT_TRUE(idle());
  ASSERT_EQ(handler->requests().size(), 2U);
  EXPECT_NE(handler->requests()[0].digest, handler->requests()[1].digest);
}

TEST_F(RuntimeMissTest, UnderWaitTheCallerGetsNativesResultOnceTheServiceIsDone) {
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kWait);
  auto result = std::async(std::launch::async, [&] { return call_twice(); });
  const CompileRequest request = handler->request(0);
  EXPECT_EQ(result.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  EXPECT_EQ(state_now(), EntryState::kPending);
  runtime().complete(request.digest, "native", "not faster");
  EXPECT_TRUE(at::equal(result.get(), x_ + x_));
  EXPECT_EQ(handler->waits(), 1);
  EXPECT_EQ(state_now(), EntryState::kNative);
  EXPECT_EQ(verdict().reason, "not faster");
}

TEST_F(RuntimeMissTest, UnderWaitOtherCallersOfTheKeyDoNotWait) {
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kWait);
  auto first = std::async(std::launch::async, [&] { return call_twice(); });
  const CompileRequest request = handler->request(0);
  EXPECT_EQ(call_twice().sum().item<double>(), 10.0);
  runtime().complete(request.digest, "native", "");
  first.get();
}

TEST_F(RuntimeMissTest, UnderWaitNobodyWaitsWithoutAService) {
  set_on_miss(OnMiss::kWait);
  EXPECT_EQ(call_twice().sum().item<double>(), 10.0);
  EXPECT_TRUE(idle());
  EXPECT_EQ(state_now(), EntryState::kNative);
}

TEST_F(RuntimeMissTest, UnderNativeNothingIsEverSubmitted) {
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kNative, 1);
  const CallCounts counts = counted(twice_, [&] {
    for (int i = 0; i < 5; ++i) {
      call_twice();
    }
  });
  EXPECT_TRUE(idle());
  EXPECT_TRUE(handler->requests().empty());
  EXPECT_EQ(count(counts, CallOutcome::kMiss), 1U);
  EXPECT_EQ(count(counts, CallOutcome::kNative), 4U);
}

TEST_F(RuntimeMissTest, ADecisionInTheStoreNeedsNoService) {
  const auto store = use_store();
  const auto handler = use_handler();
  ASSERT_TRUE(store->publish(decision(EntryKind::kNative, "slower"), {}));
  for (const OnMiss on_miss : {OnMiss::kNative, OnMiss::kWait, OnMiss::kBackground}) {
    set_on_miss(on_miss, 1);
    call_twice();
    EXPECT_TRUE(idle());
    EXPECT_EQ(state_now(), EntryState::kNative);
    EXPECT_EQ(verdict().reason, "slower");
  }
  EXPECT_TRUE(handler->requests().empty());
}

TEST_F(RuntimeMissTest, WhatTheServicePublishedIsTheVerdict) {
  const auto store = use_store();
  const auto handler = use_handler([&](const CompileRequest& request) {
    EXPECT_TRUE(store->publish(decision(EntryKind::kFailed, "does not compile"), {}));
    runtime().complete(request.digest, "native", "not the store's words");
  });
  set_on_miss(OnMiss::kWait);
  call_twice();
  EXPECT_EQ(verdict().decision, "failed");
  EXPECT_EQ(verdict().reason, "does not compile");
}

TEST_F(RuntimeMissTest, AnEntryOfAFormThatIsNotUnderstoodLeavesTheKeyNative) {
  const auto store = use_store();
  TemporaryDirectory folder;
  Manifest manifest = decision(EntryKind::kKernel, "");
  manifest.facts["form"] = "hologram";
  manifest.facts["numerics"] = "bitwise";
  const std::filesystem::path object = folder.path() / "object.so";
  Dl_info library{};  // any shared object will do: the entry is refused before it is loaded
  ASSERT_NE(::dladdr(reinterpret_cast<const void*>(&std::terminate), &library), 0);
  std::filesystem::copy_file(library.dli_fname, object);
  const Result<Manifest> published =
      store->publish(manifest, {{ObjectKind::kSharedObject, object}});
  ASSERT_TRUE(published) << published.status().to_string();
  set_on_miss(OnMiss::kNative);
  EXPECT_EQ(call_twice().sum().item<double>(), 10.0);
  EXPECT_EQ(state_now(), EntryState::kNative);
  EXPECT_EQ(verdict().decision, "failed");
}

TEST_F(RuntimeMissTest, AFrozenRuntimeInstallsNothingAndForgetsItWhenThawed) {
  const auto store = use_store();
  const auto handler = use_handler();
  FakeKernel& old_kernel = filling_kernel(3.0);
  const at::Tensor other = at::ones({6});
  install(twice_, {other}, old_kernel);
  set_on_miss(OnMiss::kBackground, 1);  // clears the table
  install(twice_, {other}, old_kernel);
  call_twice();
  const CompileRequest under_way = handler->request(0);
  runtime().freeze();
  EXPECT_TRUE(store->publish(decision(EntryKind::kNative, "slower"), {}));
  runtime().complete(under_way.digest, "native", "");
  EXPECT_TRUE(idle());
  EXPECT_EQ(state_now(), EntryState::kPending);
  const CallCounts counts = counted(twice_, [&] {
    EXPECT_EQ(call_twice(other).sum().item<double>(), 18.0) << "a kernel in use goes on";
    EXPECT_EQ(call_twice(at::ones({7})).sum().item<double>(), 14.0);
  });
  EXPECT_EQ(count(counts, CallOutcome::kHit), 1U);
  EXPECT_EQ(count(counts, CallOutcome::kNative), 1U);
  EXPECT_EQ(state(twice_, {at::ones({7})}), EntryState::kAbsent);
  EXPECT_TRUE(idle());
  EXPECT_EQ(handler->requests().size(), 1U);
  runtime().thaw();
  call_twice();  // the second call of its key: asked again
  EXPECT_TRUE(idle());
  EXPECT_EQ(state_now(), EntryState::kNative);
  EXPECT_EQ(verdict().reason, "slower");
}

TEST_F(RuntimeMissTest, UnderDeterministicAlgorithmsOnlyBitwiseKernelsPass) {
  const RestoredGlobals restored;
  const auto store = use_store();
  TemporaryDirectory folder;
  const std::filesystem::path object = folder.path() / "object.so";
  Dl_info library{};  // never loaded: refused for its numerics, or for its form after that
  ASSERT_NE(::dladdr(reinterpret_cast<const void*>(&std::terminate), &library), 0);
  std::filesystem::copy_file(library.dli_fname, object);
  for (const bool deterministic : {true, false}) {
    at::globalContext().setDeterministicAlgorithms(deterministic, false);
    Manifest manifest = decision(EntryKind::kKernel, "");
    manifest.facts["form"] = "hologram";
    manifest.facts["numerics"] = "accurate";
    ASSERT_TRUE(store->publish(manifest, {{ObjectKind::kSharedObject, object}}));
    call_twice();
    EXPECT_EQ(verdict().decision, deterministic ? "native" : "failed");
    EXPECT_EQ(verdict().reason.starts_with("not bitwise"), deterministic);
  }
}

TEST_F(RuntimeMissTest, ADigestThatNobodyAskedForIsHarmless) {
  use_store();
  use_handler();
  runtime().complete(std::string(64, 'a'), "kernel", "");
  runtime().complete("not a digest", "failed", "");
  EXPECT_EQ(runtime().outstanding(), 0U);
  EXPECT_EQ(call_twice().sum().item<double>(), 10.0);
}

TEST_F(RuntimeMissTest, AnswersThatComeTwiceAreHarmless) {
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kBackground, 1);
  call_twice();
  const std::string digest = handler->request(0).digest;
  runtime().complete(digest, "native", "first");
  runtime().complete(digest, "native", "second");
  EXPECT_TRUE(idle());
  EXPECT_EQ(verdict().reason, "first");
}

TEST_F(RuntimeMissTest, AServiceThatThrowsLeavesTheOperatorWorkingAndTheKeyNative) {
  use_store();
  const auto handler =
      use_handler([](const CompileRequest&) { throw std::runtime_error("no service today"); });
  for (const OnMiss on_miss : {OnMiss::kBackground, OnMiss::kWait}) {
    set_on_miss(on_miss, 1);
    EXPECT_EQ(call_twice().sum().item<double>(), 10.0);
    EXPECT_TRUE(idle());
    EXPECT_EQ(state_now(), EntryState::kNative);
    EXPECT_EQ(verdict().decision, "failed");
    EXPECT_EQ(verdict().reason, "no service today");
  }
  EXPECT_EQ(handler->requests().size(), 2U);
}

TEST_F(RuntimeMissTest, WaitingForIdlenessTakesTheServicesKeysIntoAccount) {
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kBackground, 1);
  call_twice();
  const CompileRequest request = handler->request(0);
  EXPECT_FALSE(runtime().wait_until_idle(0.05));
  EXPECT_GE(runtime().outstanding(), 1U);
  auto waiting = std::async(std::launch::async, [] { return runtime().wait_until_idle(-1); });
  runtime().complete(request.digest, "native", "");
  EXPECT_TRUE(waiting.get());
  EXPECT_EQ(runtime().outstanding(), 0U);
  EXPECT_EQ(state_now(), EntryState::kNative) << "idle means that the verdict stands";
}

TEST_F(RuntimeMissTest, AVerdictOfAnEarlierPolicyIsNotInstalled) {
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kBackground, 1);
  call_twice();
  const CompileRequest request = handler->request(0);
  set_on_miss(OnMiss::kBackground, 1);
  runtime().complete(request.digest, "native", "old");
  EXPECT_TRUE(idle());
  EXPECT_EQ(state_now(), EntryState::kAbsent);
}

TEST_F(RuntimeMissTest, AKeyInTheServiceWhenThePolicyChangesStillGetsAVerdictOnceItIsMetAgain) {
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kBackground, 1);
  call_twice();
  const CompileRequest request = handler->request(0);
  set_on_miss(OnMiss::kBackground, 1);
  call_twice();  // the same digest, of the new policy, while the service has it
  for (int i = 0; i < 200 && runtime().outstanding() != 1; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  runtime().complete(request.digest, "native", "not faster");
  if (handler->requests().size() > 1) {
    runtime().complete(handler->requests()[1].digest, "native", "not faster");
  }
  EXPECT_TRUE(idle());
  EXPECT_EQ(state_now(), EntryState::kNative);
}

}  // namespace
}  // namespace eagercache
