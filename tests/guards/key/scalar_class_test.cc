#include "guards/key/scalar_class.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "tests/guards/calls.h"

namespace eagercache {
namespace {

using testing::make_float;
using testing::make_int;
using testing::make_list;
using testing::make_scalar;
using testing::make_tensor;

constexpr std::uint8_t kHalf = 5;
constexpr std::uint8_t kFloat = 6;
constexpr std::uint8_t kLong = 4;
constexpr std::uint8_t kBool = 11;

std::vector<Word> key(std::vector<DecodedArgument> arguments) {
  DecodedCall call;
  call.arguments = std::move(arguments);
  KeyBuffer buffer;
  EXPECT_TRUE(encode_call(call, &buffer));
  return {buffer.words().begin(), buffer.words().end()};
}

DecodedArgument tensor(std::uint8_t dtype = kFloat) {
  TensorTraits traits;
  traits.dtype = dtype;
  return make_tensor(traits, {4, 5}, {5, 1});
}

struct Class {
  std::vector<Word> words;
  std::vector<double> numbers;
};

Class class_of(const std::vector<Word>& words) {
  Class found{std::vector<Word>(words.size()), {}};
  std::array<double, kMaxScalars> numbers{};
  const std::size_t count = scalar_class(words, found.words, numbers);
  found.numbers.assign(numbers.begin(), numbers.begin() + static_cast<std::ptrdiff_t>(count));
  return found;
}

Class class_with(double number, std::uint8_t dtype = kFloat) {
  return class_of(key({tensor(dtype), make_float(number)}));
}

TEST(ScalarClass, NumbersAreLeftOutInOrder) {
  const auto with = [](double a, double b, double c) {
    return class_of(key({tensor(), make_float(a), make_int(3),
                         make_list(ArgumentKind::kScalarList, {make_float(b), make_float(c)})}));
  };
  const Class one = with(0.1, 0.7, -3.3);
  EXPECT_EQ(one.numbers, (std::vector<double>{0.1, 0.7, -3.3}));
  const Class other = with(0.2, 0.9, -7.1);
  EXPECT_EQ(one.words, other.words);
  EXPECT_EQ(other.numbers, (std::vector<double>{0.2, 0.9, -7.1}));
}

TEST(ScalarClass, ClassWordsAreACallOfTheirOwnClass) {
  const Class first = class_with(0.125001);
  const Class again = class_of(first.words);
  EXPECT_EQ(again.words, first.words);
  EXPECT_EQ(again.numbers.size(), 1U);
  DecodedCall call;
  EXPECT_TRUE(decode_call(first.words, &call));
}

TEST(ScalarClass, SpecialNumbersHaveKeysOfTheirOwn) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double number :
       {0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, -2.5, 16.0, kInfinity, -kInfinity,
        std::numeric_limits<double>::quiet_NaN(), 1e-40, 1e40, -1e40, 0x1p-101, 0x1.8p100}) {
    EXPECT_TRUE(class_with(number).numbers.empty()) << number;
  }
  for (const double number : {0.1, -0.1, 0.49, 0.51, 2.25, 16.5, 100.0, 0x1p-100, 0x1p100}) {
    EXPECT_EQ(class_with(number).numbers.size(), 1U) << number;
  }
  EXPECT_NE(key({tensor(), make_float(1.0)}), class_with(0.7).words);
}

TEST(ScalarClass, SignAndSideOfAHalfTellClassesApart) {
  EXPECT_EQ(class_with(0.1).words, class_with(0.4).words);
  EXPECT_EQ(class_with(0.6).words, class_with(40.3).words);
  EXPECT_NE(class_with(0.1).words, class_with(-0.1).words);
  EXPECT_NE(class_with(0.4).words, class_with(0.6).words);
}

TEST(ScalarClass, HalfPrecisionHasANarrowerRange) {
  EXPECT_EQ(class_with(1e-6).numbers.size(), 1U);
  EXPECT_TRUE(class_with(1e-6, kHalf).numbers.empty());
  EXPECT_TRUE(class_with(70'000.25, kHalf).numbers.empty());
  EXPECT_EQ(class_with(0.1, kHalf).numbers.size(), 1U);
}

TEST(ScalarClass, OnlyCallsOfFloatingPointTensorsHaveOne) {
  EXPECT_TRUE(class_with(0.1, kLong).numbers.empty());
  EXPECT_TRUE(class_with(0.1, kBool).numbers.empty());
  EXPECT_EQ(class_of(key({tensor(), tensor(kBool), make_float(0.1)})).numbers.size(), 1U);
  EXPECT_TRUE(class_of(key({tensor(), tensor(kLong), make_float(0.1)})).numbers.empty());
  EXPECT_TRUE(class_of(key({tensor(), make_int(7)})).numbers.empty());
  EXPECT_TRUE(
      class_of(key({tensor(), make_float(0.1), make_scalar(ArgumentKind::kScalarType, {kLong})}))
          .numbers.empty());
  EXPECT_TRUE(class_of(key({make_float(0.1)})).numbers.empty());
}

TEST(ScalarClass, WhatIsNoKeyHasNone) {
  std::vector<Word> cut = key({make_float(0.1), tensor()});
  cut.pop_back();
  EXPECT_TRUE(class_of(cut).numbers.empty());
  EXPECT_TRUE(class_of({}).numbers.empty());
}

}  // namespace
}  // namespace eagercache
