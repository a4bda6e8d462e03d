#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dispatcher/hook/counters.h"
#include "dispatcher/kernels/loaded_kernel.h"
#include "dispatcher/runtime/miss_handler.h"
#include "dispatcher/runtime/runtime.h"
#include "tests/guards/builder/reading.h"
#include "tests/support/temporary_directory.h"

namespace eagercache {

// A kernel whose answer is a function of the test.
class FakeKernel final : public LoadedKernel {
 public:
  using Inputs = std::span<const at::Tensor* const>;
  using Outputs = std::span<at::Tensor>;
  using Body = std::function<Outcome(Inputs, Outputs)>;

  FakeKernel(std::size_t num_inputs, std::size_t num_outputs, Body body)
      : num_inputs_(num_inputs), num_outputs_(num_outputs), body_(std::move(body)) {}

  Outcome run(Inputs inputs, Outputs outputs, c10::Device device) noexcept override;
  std::size_t num_inputs() const noexcept override { return num_inputs_; }
  std::size_t num_outputs() const noexcept override { return num_outputs_; }
  int runs() const { return runs_.load(); }

 private:
  const std::size_t num_inputs_;
  const std::size_t num_outputs_;
  const Body body_;
  std::atomic<int> runs_{0};
};

// A compile service that collects requests, and does what the test says with each.
class FakeHandler final : public MissHandler {
 public:
  using Action = std::function<void(const CompileRequest&)>;
  explicit FakeHandler(Action action = {}) : action_(std::move(action)) {}

  void submit(const CompileRequest& request) override;
  void run_blocking(const std::function<bool()>& wait) override;

  std::vector<CompileRequest> requests() const;
  // The request number `index`, waiting until the action is over, for up to 20 seconds. Fails the
  // test without it.
  CompileRequest request(std::size_t index) const;
  int waits() const { return waits_.load(); }

 private:
  const Action action_;
  std::atomic<int> waits_{0};
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<CompileRequest> requests_;  // guarded by mutex_
  std::size_t handled_ = 0;               // guarded by mutex_
};

// The runtime with answering hooks, no store, no handler, and OnMiss::kNative; put back at the end.
//
// Operators of the test's own, at CPU (native_runs() counts the calls of each):
//   eagercache_test::twice(Tensor x) -> Tensor    x + x
//   eagercache_test::refuse(Tensor x) -> Tensor   throws "refused by native"
//   eagercache_test::inner(Tensor x) -> Tensor    twice(x), through the dispatcher
class HookTest : public testing::Test {
 protected:
  HookTest();
  ~HookTest() override;

  static Runtime& runtime() { return Runtime::instance(); }
  static void set_on_miss(OnMiss on_miss, std::uint32_t compile_after = 2);

  // The active hook of "aten::var.correction" at CPU.
  static OperatorHook& hook(const std::string& name);
  // A kernel that lives for ever.
  static FakeKernel& kernel(std::size_t inputs, std::size_t outputs, FakeKernel::Body body);
  // One that answers every output with a tensor like its first input, filled with `value`.
  static FakeKernel& filling_kernel(double value, std::size_t inputs = 1, std::size_t outputs = 1);
  // Makes `kernel` the verdict for calls like this one.
  static void install(OperatorHook& hook, const Values& arguments, LoadedKernel& kernel);
  static EntryState state(OperatorHook& hook, const Values& arguments);
  // The key of such calls.
  static std::vector<Word> key_of(const OperatorHook& hook, const Values& arguments);
  // The digest under which the store knows such calls (policy Choose::kFaster).
  static Digest digest(OperatorHook& hook, const Values& arguments);

  // What `calls` adds to the hook's counters.
  static CallCounts counted(const OperatorHook& hook, const std::function<void()>& calls);
  static std::uint64_t count(const CallCounts& counts, CallOutcome outcome);
  static std::uint64_t total(const CallCounts& counts);

  static at::Tensor call(const std::string& name, const at::Tensor& x);
  static int native_runs(const std::string& name);

  std::shared_ptr<FakeHandler> use_handler(FakeHandler::Action action = {});
  // An empty store in a directory of its own.
  std::shared_ptr<DiskStore> use_store();

  // A copy of a test's object, at `target`, that says it was made for the entry as it is.
  static std::filesystem::path object_made_for(const Manifest& manifest,
                                               const std::filesystem::path& object,
                                               const std::filesystem::path& target);

 private:
  TemporaryDirectory directory_;
};

}  // namespace eagercache
