// Calls that look alike and are not: each pair was, or could be, one key in earlier kernel caches
// for eager PyTorch. And calls that are alike and must stay so.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/guards/builder/reading.h"

namespace eagercache {
namespace {

// The reading of a call that has a key.
Reading keyed(const Reading& reading) {
  EXPECT_EQ(reading.reason, AsideReason::kNone);
  return reading;
}

at::Tensor square() { return at::zeros({4, 4}); }

Reading scalar(const at::Scalar& value) { return keyed(read_as("Scalar x", {value})); }

TEST(WrongHits, BetaIsNotAlphaThoughBothAreTwoAndTheOtherIsTheDefault) {
  const at::Tensor x = square();
  const Reading beta = keyed(read_aten("aten::addmm", {x, x, x, 2, 1}));
  const Reading alpha = keyed(read_aten("aten::addmm", {x, x, x, 1, 2}));
  EXPECT_NE(beta, alpha);
  EXPECT_NE(beta, keyed(read_aten("aten::addmm", {x, x, x, 1, 1})));
}

TEST(WrongHits, ADimensionIsNotKeepdim) {
  const at::Tensor x = square();
  EXPECT_NE(keyed(read_aten("aten::argmax", {x, 1, false})),
            keyed(read_aten("aten::argmax", {x, c10::IValue(), true})));
  EXPECT_NE(keyed(read_aten("aten::argmax", {x, 0, true})),
            keyed(read_aten("aten::argmax", {x, 1, false})));
}

TEST(WrongHits, AnArgumentEqualToItsDefaultIsInTheKey) {
  const Reading call = keyed(read_aten("aten::addmm", {square(), square(), square(), 1, 1}));
  ASSERT_EQ(call.decoded().arguments.size(), 5U);
  EXPECT_EQ(call.decoded().arguments[3].kind, ArgumentKind::kInt);
  EXPECT_EQ(call.decoded().arguments[4].kind, ArgumentKind::kInt);
}

TEST(WrongHits, TrueIsNotOneIsNotOnePointZero) {
  EXPECT_NE(scalar(true), scalar(1));
  EXPECT_NE(scalar(1), scalar(1.0));
  EXPECT_NE(scalar(true), scalar(1.0));
  EXPECT_NE(scalar(1.0), scalar(c10::complex<double>(1.0, 0.0)));
  const at::Tensor flags = at::zeros({4}, at::kBool);
  EXPECT_NE(keyed(read_aten("aten::mul.Scalar", {flags, true})),
            keyed(read_aten("aten::mul.Scalar", {flags, 1})));
  const std::vector<std::int64_t> size{4};
  const auto full = [&size](const at::Scalar& fill) {
    return keyed(read_aten("aten::full", {size, fill, {}, {}, {}, {}}));
  };
  EXPECT_NE(full(true), full(1));
}

TEST(WrongHits, ZeroIsNotMinusZero) {
  EXPECT_NE(scalar(0.0), scalar(-0.0));
  EXPECT_NE(keyed(read_aten("aten::copysign.Scalar", {square(), 0.0})),
            keyed(read_aten("aten::copysign.Scalar", {square(), -0.0})));
  EXPECT_NE(keyed(read_as("float[] x", {std::vector<double>{0.0}})),
            keyed(read_as("float[] x", {std::vector<double>{-0.0}})));
}

TEST(WrongHits, NanIsItselfSoThatItsKeyIsNotMissedForEver) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(scalar(nan), scalar(nan));
  EXPECT_NE(scalar(nan), scalar(-nan));
  EXPECT_NE(scalar(nan), scalar(std::numeric_limits<double>::infinity()));
}

TEST(WrongHits, AWrappedNumberIsNotAZeroDimensionalTensor) {
  const at::Tensor x = square();
  const at::Tensor plain = at::scalar_tensor(1.7, at::kDouble);
  EXPECT_NE(keyed(read_aten("aten::add.Tensor", {x, wrapped_number(1.7), 1})),
            keyed(read_aten("aten::add.Tensor", {x, plain, 1})));
}

TEST(WrongHits, AWrappedNumberIsDataAndAKernelInput) {
  const at::Tensor x = square();
  const Reading small = keyed(read_aten("aten::add.Tensor", {x, wrapped_number(1.7), 1}));
  const Reading large = keyed(read_aten("aten::add.Tensor", {x, wrapped_number(1e30), 1}));
  EXPECT_EQ(small.tensors, 2U);
  EXPECT_EQ(small, large);
}

TEST(WrongHits, TheHolesOfAnIndexListTellWhichDimensionIsIndexed) {
  const at::Tensor x = square();
  const at::Tensor index = at::zeros({4}, at::kLong);
  const Reading rows = keyed(read_aten("aten::index.Tensor", {x, optional_tensor_list({index})}));
  const Reading columns =
      keyed(read_aten("aten::index.Tensor", {x, optional_tensor_list({std::nullopt, index})}));
  const Reading padded =
      keyed(read_aten("aten::index.Tensor", {x, optional_tensor_list({index, std::nullopt})}));
  EXPECT_NE(rows, columns);
  EXPECT_NE(rows, padded);
  EXPECT_NE(columns, padded);
}

TEST(WrongHits, AnUndefinedElementIsNotAHole) {
  EXPECT_NE(keyed(read_as("Tensor?[] x", {optional_tensor_list({std::nullopt})})),
            keyed(read_as("Tensor?[] x", {optional_tensor_list({at::Tensor()})})));
}

TEST(WrongHits, IntegersKeepAllOfTheir64Bits) {
  constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t kHighest = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kTwoTo32 = std::int64_t{1} << 32;
  for (const std::int64_t value : {kLowest, kLowest + 1, -kTwoTo32, std::int64_t{-1},
                                   std::int64_t{0}, kTwoTo32, kHighest - 1, kHighest}) {
    EXPECT_EQ(scalar(value).argument().payload, std::vector<Word>{static_cast<Word>(value)});
  }
  EXPECT_NE(scalar(std::int64_t{3}), scalar(kTwoTo32 + 3));
  EXPECT_NE(keyed(read_as("int[] x", {std::vector<std::int64_t>{3}})),
            keyed(read_as("int[] x", {std::vector<std::int64_t>{kTwoTo32 + 3}})));
}

TEST(WrongHits, ComplexScalarsHaveBothParts) {
  using Complex = c10::complex<double>;
  EXPECT_NE(scalar(Complex(1.0, 2.0)), scalar(Complex(2.0, 1.0)));
  EXPECT_NE(scalar(Complex(1.0, 0.0)), scalar(Complex(1.0, -0.0)));
  EXPECT_NE(scalar(Complex(3.0, 2.0)), scalar(Complex(1.0, 2.0)));
  EXPECT_EQ(scalar(Complex(1.0, 2.0)), scalar(Complex(1.0, 2.0)));
}

TEST(WrongHits, ANumberIsNotATensorOptionWithThatNumber) {
  const auto number = static_cast<std::int64_t>(at::kFloat);
  EXPECT_NE(keyed(read_as("int? x", {number})), keyed(read_as("ScalarType? x", {number})));
  EXPECT_NE(keyed(read_as("Layout? x", {0})), keyed(read_as("MemoryFormat? x", {0})));
}

TEST(WrongHits, ListBordersAreInTheKey) {
  const at::Tensor x = square();
  EXPECT_NE(keyed(read_as("Tensor[] x, Tensor[] y", {tensor_list({x, x}), tensor_list({x})})),
            keyed(read_as("Tensor[] x, Tensor[] y", {tensor_list({x}), tensor_list({x, x})})));
  using Ints = std::vector<std::int64_t>;
  EXPECT_NE(keyed(read_as("int[] x, int[] y", {Ints{1, 2}, Ints{}})),
            keyed(read_as("int[] x, int[] y", {Ints{1}, Ints{2}})));
  EXPECT_NE(keyed(read_as("int[]? x", {Ints{}})), keyed(read_as("int[]? x", {c10::IValue()})));
}

TEST(WrongHits, StringsThatAreBeginningsOfOneAnotherDiffer) {
  const auto text = [](const char* value) { return keyed(read_as("str x", {std::string(value)})); };
  EXPECT_NE(text("floor"), text("floor_"));
  EXPECT_NE(keyed(read_as("str? x", {c10::IValue()})), text(""));
}

TEST(WrongHits, TensorsOfMoreThan255DimensionsDoNotPassForSmallerOnes) {
  const at::Tensor many = at::zeros(std::vector<std::int64_t>(256 + 4, 1));
  const Reading reading = read_tensor(many);
  if (reading.reason == AsideReason::kNone) {
    EXPECT_NE(reading, read_tensor(at::zeros({1, 1, 1, 1})));
    EXPECT_EQ(reading.argument().sizes.size(), 260U);
  } else {
    EXPECT_EQ(reading.reason, AsideReason::kKeyTooLong);
  }
}

}  // namespace
}  // namespace eagercache
