// Whatever call of the store fails, the operator's answer is native's.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/dispatcher/hook_fixture.h"
#include "tests/support/fault_file_layer.h"

namespace eagercache {
namespace {

constexpr std::array kErrors{ENOSPC, EDQUOT, EIO, EMFILE, ENOMEM, EROFS, EACCES, ESTALE, EINTR};

class StoreFaultsTest : public HookTest {
 protected:
  // A store of its own each time.
  StoreOptions store_options() {
    StoreOptions options;
    options.root = directory_.path() / std::to_string(++stores_);
    options.environment = "compiler: none\n";
    return options;
  }

  void put_kernel(const StoreOptions& options) {
    const auto store = std::move(DiskStore::open(options)).value();
    Manifest manifest;
    manifest.key = digest(twice_, {x_});
    manifest.kind = EntryKind::kKernel;
    manifest.facts = {
        {"form", "bare"},
        {"numerics", "bitwise"},
        {"launch_plan",
         R"({"entry":"eagercache_kernel_2a","inputs":1,)"
         R"("outputs":[{"dtype":"float32","sizes":[5],"strides":[1]}],"scratch":[20],"version":2,"writes":[]})"}};
    // And an object of its own, because a process loads each but once.
    const std::filesystem::path source = directory_.path() / "kernel.so";
    object_made_for(manifest, EAGERCACHE_TEST_BARE_OBJECT, source);
    std::ofstream(source, std::ios::app) << "number " << stores_;
    ASSERT_TRUE(store->publish(manifest, {{ObjectKind::kSharedObject, source}}));
  }

  TemporaryDirectory directory_;
  int stores_ = 0;
  const at::Tensor x_ = at::arange(5, at::kFloat);
  const at::Tensor expected_ = x_ + x_;
  OperatorHook& twice_ = hook("eagercache_test::twice");
};

// Loading: find, verify, load, first run.
TEST_F(StoreFaultsTest, AtAnyCallOfALoadTheAnswerIsNatives) {
  for (const int error : kErrors) {
    for (std::uint64_t n = 1;; ++n) {
      const std::string what = "errno " + std::to_string(error) + " at call " + std::to_string(n);
      StoreOptions options = store_options();
      put_kernel(options);
      FaultFileLayer files;
      files.set_sync_enabled(false);
      options.files = &files;
      {
        const std::shared_ptr<DiskStore> store = std::move(DiskStore::open(options)).value();
        runtime().set_store(store);
        set_on_miss(OnMiss::kNative);  // and no table remembers a verdict
        files.fail_call(n, error);
        for (int call_number = 0; call_number < 3; ++call_number) {
          ASSERT_TRUE(at::equal(call("eagercache_test::twice", x_), expected_)) << what;
        }
        runtime().set_store(nullptr);
      }
      if (!files.fault_happened()) {
        ASSERT_GT(n, 10U) << "a load makes more calls than this";
        ASSERT_EQ(state(twice_, {x_}), EntryState::kKernel) << "without a fault it is a hit";
        break;
      }
    }
  }
}

// Opening and publishing, then the call.
TEST_F(StoreFaultsTest, AtAnyCallOfOpeningAndPublishingTheAnswerIsNatives) {
  for (const int error : kErrors) {
    for (std::uint64_t n = 1;; ++n) {
      const std::string what = "errno " + std::to_string(error) + " at call " + std::to_string(n);
      FaultFileLayer files;
      files.set_sync_enabled(false);
      StoreOptions options = store_options();
      options.files = &files;
      files.fail_call(n, error);
      auto opened = DiskStore::open(options);
      if (opened) {
        const std::shared_ptr<DiskStore> store = std::move(opened).value();
        Manifest decision;
        decision.key = digest(twice_, {x_});
        decision.kind = EntryKind::kNative;
        (void)store->publish(decision, {}).is_ok();
        runtime().set_store(store);
      }
      set_on_miss(OnMiss::kNative);
      ASSERT_TRUE(at::equal(call("eagercache_test::twice", x_), expected_)) << what;
      ASSERT_TRUE(at::equal(call("eagercache_test::twice", x_), expected_)) << what;
      runtime().set_store(nullptr);
      if (!files.fault_happened()) {
        ASSERT_GT(n, 40U) << "opening and publishing make more calls than this";
        break;
      }
    }
  }
}

}  // namespace
}  // namespace eagercache
