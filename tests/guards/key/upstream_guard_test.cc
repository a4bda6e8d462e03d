// The thirteen guard tests of PyTorch's test/cpp/aoti_eager/kernel_meta_info_test.cpp, asked of the
// call key. Upstream's "dynamic check" lets any sizes of the same rank pass without a guard; a key
// of ours is exact, and a kernel for other sizes needs guards of its own, so there the answer is
// "another key".

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "guards/key/call_key.h"
#include "tests/guards/calls.h"

namespace eagercache {
namespace {

constexpr std::uint8_t kFloat32 = 6;
constexpr std::uint8_t kFloat64 = 7;
constexpr std::uint8_t kCpu = 0;
constexpr std::uint8_t kCuda = 1;

// A contiguous tensor.
DecodedArgument tensor(std::vector<std::int64_t> sizes, std::uint8_t dtype = kFloat32,
                       std::uint8_t device = kCpu) {
  TensorTraits traits;
  traits.dtype = dtype;
  traits.device_type = device;
  traits.device_index = device == kCpu ? std::int8_t{-1} : std::int8_t{0};
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i > 1; --i) {
    strides[i - 2] = strides[i - 1] * sizes[i - 1];
  }
  return testing::make_tensor(traits, std::move(sizes), std::move(strides));
}

DecodedArgument tensors(std::vector<DecodedArgument> elements) {
  return testing::make_list(ArgumentKind::kTensorList, std::move(elements));
}

DecodedArgument scalar(double value) { return testing::make_float(value); }

DecodedArgument text(std::string value) { return testing::make_string(std::move(value)); }

std::vector<Word> key_of(std::vector<DecodedArgument> arguments) {
  DecodedCall call;
  call.arguments = std::move(arguments);
  KeyBuffer buffer;
  EXPECT_TRUE(encode_call(call, &buffer));
  return {buffer.words().begin(), buffer.words().end()};
}

TEST(UpstreamGuards, SameDtypeDeviceAndRankWithOtherSizesIsAnotherKey) {
  EXPECT_NE(key_of({tensor({2, 3})}), key_of({tensor({4, 5})}));
}

TEST(UpstreamGuards, AnotherDtypeIsAnotherKey) {
  EXPECT_NE(key_of({tensor({2, 3})}), key_of({tensor({2, 3}, kFloat64)}));
}

TEST(UpstreamGuards, AnotherRankIsAnotherKey) {
  EXPECT_NE(key_of({tensor({6})}), key_of({tensor({2, 3})}));
}

TEST(UpstreamGuards, AnotherDeviceIsAnotherKey) {
  EXPECT_NE(key_of({tensor({2, 3})}), key_of({tensor({2, 3}, kFloat32, kCuda)}));
}

TEST(UpstreamGuards, IdenticalMetadataIsTheSameKey) {
  EXPECT_EQ(key_of({tensor({2, 3})}), key_of({tensor({2, 3})}));
}

TEST(UpstreamGuards, ZeroDimensionalTensorsOfOneDtypeAreTheSameKey) {
  EXPECT_EQ(key_of({tensor({})}), key_of({tensor({})}));
  EXPECT_NE(key_of({tensor({})}), key_of({tensor({1})}));
}

TEST(UpstreamGuards, ATensorParameterWithOtherSizesIsAnotherKey) {
  EXPECT_NE(key_of({scalar(1), tensor({2, 3})}), key_of({scalar(1), tensor({4, 5})}));
}

TEST(UpstreamGuards, ATensorParameterOfAnotherDtypeIsAnotherKey) {
  EXPECT_NE(key_of({scalar(1), tensor({2})}), key_of({scalar(1), tensor({2}, kFloat64)}));
}

TEST(UpstreamGuards, AnotherOrderIsAnotherKey) {
  EXPECT_NE(key_of({tensor({2, 3}), scalar(1)}), key_of({scalar(1), tensor({2, 3})}));
}

TEST(UpstreamGuards, ScalarsMustBeExactlyEqual) {
  EXPECT_EQ(key_of({scalar(1.5)}), key_of({scalar(1.5)}));
  EXPECT_NE(key_of({scalar(1.5)}), key_of({scalar(2.5)}));
}

TEST(UpstreamGuards, ATensorListWithOtherSizesIsAnotherKey) {
  EXPECT_EQ(key_of({tensors({tensor({2}), tensor({3})})}),
            key_of({tensors({tensor({2}), tensor({3})})}));
  EXPECT_NE(key_of({tensors({tensor({2}), tensor({3})})}),
            key_of({tensors({tensor({4}), tensor({5})})}));
}

TEST(UpstreamGuards, ATensorListOfAnotherLengthIsAnotherKey) {
  EXPECT_NE(key_of({tensors({tensor({2})})}), key_of({tensors({tensor({2}), tensor({2})})}));
}

TEST(UpstreamGuards, StringsMustBeExactlyEqual) {
  EXPECT_EQ(key_of({text("trunc")}), key_of({text("trunc")}));
  EXPECT_NE(key_of({text("trunc")}), key_of({text("floor")}));
}

}  // namespace
}  // namespace eagercache
