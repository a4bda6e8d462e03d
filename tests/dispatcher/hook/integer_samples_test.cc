// What a call's integer tensors held, on its way to the compile service.

#include "dispatcher/hook/integer_samples.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

std::vector<IntegerSample> samples_of(const std::vector<at::Tensor>& tensors) {
  std::vector<const at::Tensor*> pointers;
  for (const at::Tensor& tensor : tensors) {
    pointers.push_back(&tensor);
  }
  return sample_integers(pointers);
}

TEST(IntegerSamples, AreReadInRowMajorOrderThroughAnyStrides) {
  const at::Tensor base = at::arange(12, at::kLong).view({3, 4});
  const auto samples = samples_of({at::ones({2}), base.t(), base.slice(1, 1, 4, 2)});
  ASSERT_EQ(samples.size(), 2U);
  EXPECT_EQ(samples[0].tensor, 1U);
  EXPECT_TRUE(samples[0].whole);
  EXPECT_EQ(samples[0].values, (std::vector<std::int64_t>{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11}));
  EXPECT_EQ(samples[1].tensor, 2U);
  EXPECT_EQ(samples[1].values, (std::vector<std::int64_t>{1, 3, 5, 7, 9, 11}));
}

TEST(IntegerSamples, HaveTheValuesOfEveryIntegerType) {
  for (const auto dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    const std::int64_t first = dtype == at::kByte ? 200 : -7;
    const auto samples = samples_of({at::tensor({first, std::int64_t{3}}).to(dtype)});
    ASSERT_EQ(samples.size(), 1U) << dtype;
    EXPECT_EQ(samples[0].values, (std::vector<std::int64_t>{first, 3})) << dtype;
  }
}

TEST(IntegerSamples, LeaveEverythingElseAlone) {
  at::Tensor number = at::scalar_tensor(3, at::kLong);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  const at::Tensor elsewhere = at::empty({3}, at::TensorOptions(at::kMeta).dtype(at::kLong));
  EXPECT_TRUE(samples_of({at::ones({3}), at::ones({3}, at::kBool), at::empty({0}, at::kLong),
                          number, elsewhere})
                  .empty());
}

TEST(IntegerSamples, OfALargeTensorAreSomeFromItsFirstToItsLastElement) {
  const auto samples = samples_of({at::arange(100'000, at::kInt), at::arange(4, at::kInt)});
  ASSERT_EQ(samples.size(), 2U);
  EXPECT_FALSE(samples[0].whole);
  EXPECT_EQ(samples[0].values.size(), kSampledIntegers);
  EXPECT_EQ(samples[0].values.front(), 0);
  EXPECT_EQ(samples[0].values.back(), 99'999);
  EXPECT_TRUE(samples[1].whole);
}

TEST(IntegerSamples, OfManyTensorsAreBounded) {
  const std::vector<at::Tensor> many(20, at::arange(300, at::kLong));
  const auto samples = samples_of(many);
  std::size_t values = 0;
  for (const IntegerSample& sample : samples) {
    EXPECT_EQ(sample.whole, sample.values.size() == 300);
    values += sample.values.size();
  }
  EXPECT_EQ(values, kMostIntegers);
  EXPECT_LE(samples.size(), kMostIntegerTensors);
  EXPECT_EQ(samples_of(std::vector<at::Tensor>(20, at::ones({1}, at::kInt))).size(),
            kMostIntegerTensors);
}

class IntegerRequestTest : public HookTest {
 protected:
  OperatorHook& twice_ = hook("eagercache_test::twice");
};

TEST_F(IntegerRequestTest, ARequestCarriesThemFromTheCallThatAskedForIt) {
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kBackground, 3);
  for (const std::int64_t first : {1, 2, 3}) {
    call("eagercache_test::twice", at::tensor({first, std::int64_t{-5}}));
  }
  const CompileRequest request = handler->request(0);
  const auto asked = nlohmann::json::parse(request.call_json);
  EXPECT_EQ(asked["integers"],
            nlohmann::json::parse(R"([{"tensor": 0, "whole": true, "values": [3, -5]}])"));
  EXPECT_EQ(asked["calls"], 3);
  runtime().complete(request.digest, "native", "");
  EXPECT_TRUE(runtime().wait_until_idle(20));
}

TEST_F(IntegerRequestTest, ARequestWithoutIntegersSaysNothingOfThem) {
  use_store();
  const auto handler = use_handler();
  set_on_miss(OnMiss::kBackground, 1);
  call("eagercache_test::twice", at::ones({3}));
  const CompileRequest request = handler->request(0);
  EXPECT_FALSE(nlohmann::json::parse(request.call_json).contains("integers"));
  runtime().complete(request.digest, "native", "");
  EXPECT_TRUE(runtime().wait_until_idle(20));
}

}  // namespace
}  // namespace eagercache
