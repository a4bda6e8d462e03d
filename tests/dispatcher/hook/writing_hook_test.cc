// Operators that write their arguments, answered by kernels.

#include <c10/core/InferenceMode.h>

#include "dispatcher/observe/verification.h"
#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

using Outcome = LoadedKernel::Outcome;

// Adds 100 to some of its inputs, in place.
class AddingKernel final : public LoadedKernel {
 public:
  AddingKernel(std::size_t num_inputs, std::vector<std::size_t> written, std::size_t num_outputs,
               Outcome outcome)
      : num_inputs_(num_inputs),
        written_(std::move(written)),
        num_outputs_(num_outputs),
        outcome_(outcome) {}

  Outcome run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
              c10::Device /*device*/) noexcept override {
    if (outcome_ == Outcome::kNotStarted) {
      return outcome_;
    }
    for (const std::size_t index : written_) {
      auto* data = inputs[index]->mutable_data_ptr<float>();
      for (std::int64_t i = 0; i < inputs[index]->numel(); ++i) {
        data[i] += 100;
      }
    }
    for (at::Tensor& output : outputs) {
      output = at::full({2}, 7);
    }
    return outcome_;
  }
  std::size_t num_inputs() const noexcept override { return num_inputs_; }
  std::size_t num_outputs() const noexcept override { return num_outputs_; }
  bool writes_inputs() const noexcept override { return !written_.empty(); }

 private:
  const std::size_t num_inputs_;
  const std::vector<std::size_t> written_;
  const std::size_t num_outputs_;
  const Outcome outcome_;
};

class WritingHookTest : public HookTest {
 protected:
  // A kernel that lives for ever, as all do.
  static AddingKernel& adding(std::size_t num_inputs, std::vector<std::size_t> written,
                              std::size_t num_outputs = 0, Outcome outcome = Outcome::kAnswered) {
    return *new AddingKernel(num_inputs, std::move(written), num_outputs, outcome);
  }

  // The verdict for x_.add_(y_).
  void install_add(Outcome outcome = Outcome::kAnswered) {
    install(add_, {x_, y_, 1}, adding(2, {0}, 0, outcome));
  }

  OperatorHook& add_ = hook("aten::add_.Tensor");
  at::Tensor x_ = at::zeros({3});
  const at::Tensor y_ = at::ones({3});
};

TEST_F(WritingHookTest, AnInPlaceCallReturnsTheVeryTensor) {
  install_add();
  const auto version = x_._version();
  const auto counts = counted(add_, [this] {
    const at::Tensor result = x_.add_(y_);
    EXPECT_TRUE(result.is_same(x_));
  });
  EXPECT_EQ(count(counts, CallOutcome::kHit), 1U);
  EXPECT_EQ(x_[0].item<float>(), 100);
  EXPECT_EQ(x_._version(), version + 1);
}

TEST_F(WritingHookTest, VersionsMoveAsNativesDoInInferenceMode) {
  install_add();
  const c10::InferenceMode mode;
  const auto version = x_._version();
  x_.add_(y_);
  EXPECT_EQ(x_[0].item<float>(), 100);
  EXPECT_EQ(x_._version(), version + 1);
  at::Tensor made_here = at::zeros({3});
  EXPECT_TRUE(made_here.add_(y_).is_same(made_here));
  EXPECT_TRUE(made_here.is_inference());
}

TEST_F(WritingHookTest, AnOutArgumentIsReturned) {
  OperatorHook& abs = hook("aten::abs.out");
  at::Tensor out = at::zeros({3});
  install(abs, {y_, out}, adding(2, {1}));
  const auto version = out._version();
  at::Tensor& result = at::abs_out(out, y_);
  EXPECT_EQ(&result, &out);
  EXPECT_EQ(out[2].item<float>(), 100);
  EXPECT_EQ(out._version(), version + 1);
}

TEST_F(WritingHookTest, ListsAreWrittenInPlace) {
  OperatorHook& add = hook("aten::_foreach_add_.Scalar");
  const std::vector<at::Tensor> list{x_, at::zeros({2})};
  install(add, {tensor_list(list), 1.0}, adding(2, {0, 1}));
  const auto version = list[1]._version();
  at::_foreach_add_(list, 1.0);
  EXPECT_EQ(list[0][0].item<float>(), 100);
  EXPECT_EQ(list[1][1].item<float>(), 100);
  EXPECT_EQ(list[1]._version(), version + 1);
}

TEST_F(WritingHookTest, ListsAreReturned) {
  OperatorHook& add = hook("aten::_foreach_add.Scalar");
  const std::vector<at::Tensor> list{x_, at::zeros({2})};
  install(add, {tensor_list(list), 1.0}, adding(2, {}, 2));
  const std::vector<at::Tensor> result = at::_foreach_add(list, 1.0);
  ASSERT_EQ(result.size(), 2U);
  EXPECT_EQ(result[1][1].item<float>(), 7);
  EXPECT_EQ(x_[0].item<float>(), 0);
}

TEST_F(WritingHookTest, RunningStatisticsAreWrittenAndKeepTheirVersion) {
  OperatorHook& norm = hook("aten::native_batch_norm");
  const at::Tensor image = at::ones({2, 3, 4});
  const at::Tensor mean = at::zeros({3});
  const at::Tensor variance = at::ones({3});
  const std::vector<std::int64_t> versions{mean._version(), variance._version()};
  const auto arguments = [&](bool training) {
    return Values{image, y_, x_, mean, variance, training, 0.1, 1e-5};
  };
  install(norm, arguments(true), adding(5, {3, 4}, 3));
  const auto result = at::native_batch_norm(image, y_, x_, mean, variance, true, 0.1, 1e-5);
  EXPECT_EQ(std::get<0>(result)[0].item<float>(), 7);
  EXPECT_EQ(mean[0].item<float>(), 100);
  EXPECT_EQ((std::vector<std::int64_t>{mean._version(), variance._version()}), versions);
  CallView view;
  for (const bool training : {true, false}) {
    const Values values = arguments(training);
    ASSERT_EQ(norm.read_call({values.begin(), values.end()}, view), AsideReason::kNone);
    DecodedCall call;
    ASSERT_TRUE(decode_call(view.key.words(), &call));
    EXPECT_EQ(norm.writes_in(call), training);
  }
}

TEST_F(WritingHookTest, AKernelThatFailsIsAnErrorAndNativeDoesNotRun) {
  install_add(Outcome::kFailed);
  try {
    x_.add_(y_);
    FAIL() << "nothing was thrown";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("aten::add_.Tensor"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find(digest(add_, {x_, y_, 1}).hex()), std::string::npos);
  }
  EXPECT_EQ(x_[0].item<float>(), 100) << "what the kernel had done";
  x_.add_(y_);
  EXPECT_EQ(x_[0].item<float>(), 101) << "native answers from then on";
}

TEST_F(WritingHookTest, AKernelThatDidNotStartLeavesTheCallToNative) {
  install_add(Outcome::kNotStarted);
  x_.add_(y_);
  EXPECT_EQ(x_[0].item<float>(), 1);
}

TEST_F(WritingHookTest, AreNeverVerifiedByRunningNativeToo) {
  install_add();
  set_verification_share(1);
  x_.add_(y_);
  set_verification_share(0);
  EXPECT_EQ(x_[0].item<float>(), 100);
}

TEST_F(WritingHookTest, CallsWhoseArgumentsShareWrittenMemoryStepAside) {
  install_add();
  const auto counts = counted(add_, [this] {
    x_.add_(x_);
    at::Tensor wide = at::zeros({2, 3});
    EXPECT_ANY_THROW(wide.add_(wide[0])) << "as native does";
  });
  EXPECT_EQ(counts.aside[static_cast<std::size_t>(AsideReason::kOverlap)], 2U);
}

}  // namespace
}  // namespace eagercache
