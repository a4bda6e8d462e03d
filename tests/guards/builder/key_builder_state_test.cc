// What changes the key of a call and what must not.

#include <ATen/ATen.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <gtest/gtest.h>

#include <atomic>

#include "dispatcher/hook/operator_hook.h"
#include "dispatcher/runtime/runtime.h"
#include "guards/builder/key_builder.h"
#include "tests/dispatcher/restored_globals.h"
#include "tests/guards/builder/reading.h"

namespace eagercache {
namespace {

Reading keyed(const at::Tensor& tensor) {
  const Reading reading = read_tensor(tensor);
  EXPECT_EQ(reading.reason, AsideReason::kNone);
  return reading;
}

class KeyBuilderState : public testing::Test {
 protected:
  const at::Tensor tensor_ = at::zeros({4, 8});
  const Reading before_ = keyed(tensor_);
  RestoredGlobals globals_;
};

TEST_F(KeyBuilderState, TheSameCallHasTheSameKeyWhateverTheValues) {
  EXPECT_EQ(keyed(tensor_), before_);
  EXPECT_EQ(keyed(at::ones({4, 8})), before_);
}

TEST_F(KeyBuilderState, RequiresGradIsNotInTheKey) {
  EXPECT_EQ(keyed(at::zeros({4, 8}).requires_grad_()), before_);
}

TEST_F(KeyBuilderState, GradModeIsNotInTheKey) {
  const at::NoGradGuard no_grad;
  EXPECT_EQ(keyed(tensor_), before_);
}

TEST_F(KeyBuilderState, InferenceModeAndItsTensorsWithoutAutogradKeysAreNotInTheKey) {
  const c10::InferenceMode inference;
  EXPECT_EQ(keyed(tensor_), before_);
  const at::Tensor inference_tensor = at::zeros({4, 8});
  ASSERT_FALSE(inference_tensor.key_set().has(c10::DispatchKey::AutogradCPU));
  EXPECT_EQ(keyed(inference_tensor), before_);
}

TEST_F(KeyBuilderState, TheStorageOffsetAloneIsNotInTheKey) {
  const at::Tensor large = at::zeros({2, 4, 8});
  EXPECT_EQ(keyed(large.select(0, 0)), keyed(large.select(0, 1)));
}

TEST_F(KeyBuilderState, SizesAreInTheKey) {
  EXPECT_NE(keyed(at::zeros({8, 4})), before_);
  EXPECT_NE(keyed(at::zeros({4, 8, 1})), before_);
  EXPECT_NE(keyed(at::zeros({32})), before_);
}

TEST_F(KeyBuilderState, StridesAreInTheKey) {
  EXPECT_NE(keyed(at::zeros({8, 4}).t()), before_);
  EXPECT_NE(keyed(at::zeros({1, 8}).expand({4, 8})), before_);
  EXPECT_NE(keyed(at::zeros({4, 16}).slice(1, 0, 8)), before_);
}

TEST_F(KeyBuilderState, StridesOfDimensionsOfSizeOneAreInTheKey) {
  const at::Tensor base = at::zeros({64});
  EXPECT_NE(keyed(base.as_strided({1, 8}, {8, 1})), keyed(base.as_strided({1, 8}, {1, 1})));
}

TEST_F(KeyBuilderState, AlignmentIsInTheKey) {
  const at::Tensor base = at::zeros({64});
  const Reading aligned = keyed(base.slice(0, 0, 8));
  const Reading shifted = keyed(base.slice(0, 1, 9));
  EXPECT_TRUE(aligned.argument().tensor.aligned);
  EXPECT_FALSE(shifted.argument().tensor.aligned);
  EXPECT_NE(aligned, shifted);
  EXPECT_EQ(keyed(base.slice(0, 16, 24)), aligned) << "64 bytes further is aligned again";
}

TEST_F(KeyBuilderState, TheWrappedNumberBitIsInTheKey) {
  EXPECT_NE(keyed(wrapped_number(2.0)), keyed(at::scalar_tensor(2.0, at::kDouble)));
}

TEST_F(KeyBuilderState, TheNumberOfThreadsIsInTheKey) {
  at::set_num_threads(1);
  const Reading one = keyed(tensor_);
  at::set_num_threads(2);
  const Reading two = keyed(tensor_);
  EXPECT_NE(one, two);
  EXPECT_EQ(one.decoded().state.num_threads, 1);
  EXPECT_EQ(two.decoded().state.num_threads, 2);
}

TEST_F(KeyBuilderState, DeterministicAlgorithmsAreInTheKey) {
  at::globalContext().setDeterministicAlgorithms(true, false);
  const Reading strict = keyed(tensor_);
  at::globalContext().setDeterministicAlgorithms(true, true);
  const Reading warning = keyed(tensor_);
  EXPECT_NE(strict, before_);
  EXPECT_NE(warning, before_);
  EXPECT_NE(strict, warning);
}

TEST_F(KeyBuilderState, FillingOfUninitialisedMemoryIsInTheKey) {
  const bool before = at::globalContext().deterministicFillUninitializedMemory();
  at::globalContext().setDeterministicFillUninitializedMemory(!before);
  EXPECT_NE(keyed(tensor_), before_);
}

TEST_F(KeyBuilderState, TheDefaultDtypeIsInTheKey) {
  c10::set_default_dtype(caffe2::TypeMeta::Make<double>());
  EXPECT_NE(keyed(tensor_), before_);
}

TEST_F(KeyBuilderState, PuttingTheSettingsBackGivesTheFirstKeyAgain) {
  {
    const RestoredGlobals restored;
    c10::set_default_dtype(caffe2::TypeMeta::Make<double>());
    at::globalContext().setDeterministicAlgorithms(true, true);
    at::set_num_threads(1);
  }
  EXPECT_EQ(keyed(tensor_), before_);
}

// A GPU's guard for a block, whose current device is what the test says.
class FakeGpu {
 public:
  FakeGpu() : before_(slot().exchange(&guard_)) {}
  ~FakeGpu() { slot().store(before_); }
  FakeGpu(const FakeGpu&) = delete;
  FakeGpu& operator=(const FakeGpu&) = delete;
  static void make_current(c10::DeviceIndex index) { Guard::setDeviceIndex(index); }

 private:
  using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
  static std::atomic<const c10::impl::DeviceGuardImplInterface*>& slot() {
    return c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::DeviceType::CUDA)];
  }
  const Guard guard_;
  const c10::impl::DeviceGuardImplInterface* const before_;
};

TEST_F(KeyBuilderState, ACallWithoutTensorsIsOnTheDeviceThatItNames) {
  const FakeGpu gpu;
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::zeros", "");
  const auto key = c10::DispatchKey::CUDA;
  static const OperatorHook hook(op, key, check_eligibility(op, key), kMaxHooks - 1,
                                 Runtime::instance());
  const auto read = [&](c10::Device device) {
    const std::vector<c10::IValue> arguments{std::vector<std::int64_t>{4}, {}, {}, device, {}};
    CallView view;
    EXPECT_EQ(build_key(hook.plan(), arguments, device.type(), view), AsideReason::kNone);
    EXPECT_EQ(hook.device_of(view.key.words()), view.device) << "its kernel's, and the call's";
    return view.device;
  };
  EXPECT_EQ(read(c10::Device("cuda:2")), c10::Device("cuda:2"));
  for (const c10::DeviceIndex current : {0, 3}) {
    FakeGpu::make_current(current);
    EXPECT_EQ(read(c10::Device("cuda")), c10::Device(c10::DeviceType::CUDA, current));
  }
}

TEST_F(KeyBuilderState, AReadingTakesNoOwnershipOfTheTensors) {
  const auto owners = tensor_.use_count();
  CallView view;
  const PlanResult planned =
      make_argument_plan(c10::Dispatcher::singleton().findSchemaOrThrow("aten::abs", "").schema());
  const std::vector<c10::IValue> arguments{tensor_};
  ASSERT_EQ(build_key(planned.plan, arguments, at::kCPU, view), AsideReason::kNone);
  ASSERT_EQ(view.tensors.view().size(), 1U);
  EXPECT_EQ(view.tensors.view()[0]->unsafeGetTensorImpl(), tensor_.unsafeGetTensorImpl());
  EXPECT_EQ(tensor_.use_count(), owners + 1) << "the argument's own";
}

TEST_F(KeyBuilderState, AViewThatWasUsedBeforeReadsTheNextCallAfresh) {
  CallView view;
  const PlanResult planned =
      make_argument_plan(c10::Dispatcher::singleton().findSchemaOrThrow("aten::cat", "").schema());
  const auto read = [&](const std::vector<at::Tensor>& tensors) {
    const std::vector<c10::IValue> arguments{tensor_list(tensors), 0};
    return build_key(planned.plan, arguments, at::kCPU, view);
  };
  const std::vector<at::Tensor> too_many(TensorArguments::kCapacity + 1, tensor_);
  EXPECT_EQ(read(too_many), AsideReason::kKeyTooLong);
  ASSERT_EQ(read({tensor_}), AsideReason::kNone);
  const std::vector<Word> words(view.key.words().begin(), view.key.words().end());
  EXPECT_EQ(words, read_aten("aten::cat", {tensor_list({tensor_}), 0}).words);
  EXPECT_EQ(view.tensors.view().size(), 1U);
}

}  // namespace
}  // namespace eagercache
