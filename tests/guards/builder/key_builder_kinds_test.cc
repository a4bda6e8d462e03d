// Every kind of argument that the schema language has is in the key.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <bit>
#include <limits>

#include "tests/guards/builder/reading.h"

namespace eagercache {
namespace {

Word bits(double value) { return std::bit_cast<Word>(value); }

DecodedArgument only_argument(const std::string& type, const c10::IValue& value) {
  const Reading reading = read_as(type + " x", {value});
  EXPECT_EQ(reading.reason, AsideReason::kNone);
  return reading.argument();
}

void expect_words(const std::string& type, const c10::IValue& value, ArgumentKind kind,
                  const std::vector<Word>& payload) {
  SCOPED_TRACE(type);
  const DecodedArgument argument = only_argument(type, value);
  EXPECT_EQ(argument.kind, kind);
  EXPECT_EQ(argument.payload, payload);
}

TEST(KeyBuilderKinds, ATensorsTraitsSizesAndStridesAreEncoded) {
  const at::Tensor tensor = at::zeros({2, 3, 4}, at::kBFloat16).transpose(0, 2);
  const DecodedArgument argument = read_tensor(tensor).argument();
  EXPECT_EQ(argument.kind, ArgumentKind::kTensor);
  EXPECT_EQ(argument.tensor, (TensorTraits{.dtype = static_cast<std::uint8_t>(at::kBFloat16),
                                           .device_type = static_cast<std::uint8_t>(at::kCPU),
                                           .device_index = -1,
                                           .dim = 3,
                                           .wrapped_number = false,
                                           .aligned = true}));
  EXPECT_EQ(argument.sizes, (std::vector<std::int64_t>{4, 3, 2}));
  EXPECT_EQ(argument.strides, (std::vector<std::int64_t>{1, 4, 12}));
}

TEST(KeyBuilderKinds, AZeroDimensionalTensorHasNoSizes) {
  const DecodedArgument argument = read_tensor(at::zeros({})).argument();
  EXPECT_EQ(argument.tensor.dim, 0);
  EXPECT_TRUE(argument.sizes.empty());
}

TEST(KeyBuilderKinds, NoneIsEncodedForEveryOptional) {
  for (const char* type :
       {"Tensor?", "int?", "SymInt?", "float?", "bool?", "Scalar?", "str?", "ScalarType?",
        "Layout?", "MemoryFormat?", "Device?", "int[]?", "SymInt[]?", "float[]?", "bool[]?"}) {
    SCOPED_TRACE(type);
    EXPECT_EQ(only_argument(type, c10::IValue()).kind, ArgumentKind::kNone);
  }
}

TEST(KeyBuilderKinds, NumbersAreEncodedWithTheirType) {
  expect_words("int", std::int64_t{-3}, ArgumentKind::kInt, {static_cast<Word>(-3)});
  expect_words("SymInt", std::int64_t{7}, ArgumentKind::kInt, {7});
  expect_words("float", 2.5, ArgumentKind::kFloat, {bits(2.5)});
  expect_words("bool", true, ArgumentKind::kBool, {1});
  expect_words("Scalar", at::Scalar(4), ArgumentKind::kInt, {4});
  expect_words("Scalar", at::Scalar(4.0), ArgumentKind::kFloat, {bits(4.0)});
  expect_words("Scalar", at::Scalar(false), ArgumentKind::kBool, {0});
  expect_words("Scalar", at::Scalar(c10::complex<double>(1.0, -0.0)), ArgumentKind::kComplex,
               {bits(1.0), bits(-0.0)});
}

TEST(KeyBuilderKinds, ListsOfNumbersAreEncodedElementByElement) {
  expect_words("int[]", std::vector<std::int64_t>{1, -1}, ArgumentKind::kIntList,
               {1, static_cast<Word>(-1)});
  expect_words("SymInt[]", std::vector<std::int64_t>{5}, ArgumentKind::kIntList, {5});
  expect_words("float[]", std::vector<double>{0.5, -0.0}, ArgumentKind::kFloatList,
               {bits(0.5), bits(-0.0)});
  expect_words("bool[]", bool_list({true, false}), ArgumentKind::kBoolList, {1, 0});
  expect_words("int[]", std::vector<std::int64_t>{}, ArgumentKind::kIntList, {});
}

TEST(KeyBuilderKinds, AListOfScalarsKeepsEachScalarsType) {
  const DecodedArgument list =
      only_argument("Scalar[]", scalar_list({at::Scalar(1), at::Scalar(1.0), at::Scalar(true)}));
  ASSERT_EQ(list.kind, ArgumentKind::kScalarList);
  ASSERT_EQ(list.elements.size(), 3U);
  EXPECT_EQ(list.elements[0].kind, ArgumentKind::kInt);
  EXPECT_EQ(list.elements[1].kind, ArgumentKind::kFloat);
  EXPECT_EQ(list.elements[2].kind, ArgumentKind::kBool);
}

TEST(KeyBuilderKinds, StringsAreEncodedByTheirBytes) {
  for (const std::string text : {"", "none", "exactly8", "longer than a word", "zero\0inside"}) {
    const DecodedArgument argument = only_argument("str", text);
    EXPECT_EQ(argument.kind, ArgumentKind::kString);
    EXPECT_EQ(argument.text, text);
  }
  EXPECT_EQ(only_argument("str?", std::string("tanh")).text, "tanh");
}

TEST(KeyBuilderKinds, TensorOptionsAreEncodedAndAreNotIntegers) {
  const auto number = [](auto value) { return static_cast<Word>(value); };
  expect_words("ScalarType", at::kHalf, ArgumentKind::kScalarType, {number(at::kHalf)});
  expect_words("ScalarType?", at::kHalf, ArgumentKind::kScalarType, {number(at::kHalf)});
  expect_words("Layout?", at::kStrided, ArgumentKind::kLayout, {number(at::kStrided)});
  expect_words("MemoryFormat?", at::MemoryFormat::ChannelsLast, ArgumentKind::kMemoryFormat,
               {number(at::MemoryFormat::ChannelsLast)});
  const DecodedArgument cpu = only_argument("Device?", c10::Device(at::kCPU));
  EXPECT_EQ(cpu.kind, ArgumentKind::kDevice);
  EXPECT_EQ(read_as("Device? x", {c10::Device(at::kCUDA, 0)}).reason, AsideReason::kMixedDevices);
}

TEST(KeyBuilderKinds, TensorListsGiveEveryTensorToTheKernelInOrder) {
  const Reading reading =
      read_as("Tensor[] x", {tensor_list({at::zeros({2}), at::zeros({3}, at::kDouble)})});
  EXPECT_EQ(reading.tensors, 2U);
  const DecodedArgument list = reading.argument();
  ASSERT_EQ(list.kind, ArgumentKind::kTensorList);
  ASSERT_EQ(list.elements.size(), 2U);
  EXPECT_EQ(list.elements[0].sizes, std::vector<std::int64_t>{2});
  EXPECT_EQ(list.elements[1].sizes, std::vector<std::int64_t>{3});
}

TEST(KeyBuilderKinds, HolesOfAnOptionalTensorListAreEncodedAndGivenToNoKernel) {
  const Reading reading =
      read_as("Tensor?[] x", {optional_tensor_list({std::nullopt, at::zeros({3})})});
  EXPECT_EQ(reading.tensors, 1U);
  const DecodedArgument list = reading.argument();
  ASSERT_EQ(list.elements.size(), 2U);
  EXPECT_EQ(list.elements[0].kind, ArgumentKind::kNone);
  EXPECT_EQ(list.elements[1].kind, ArgumentKind::kTensor);
}

TEST(KeyBuilderKinds, AnUndefinedTensorHasAKeyThatIsNotNones) {
  const Reading undefined = read_as("Tensor? x", {at::Tensor()});
  EXPECT_EQ(undefined.reason, AsideReason::kNone);
  EXPECT_EQ(undefined.argument().kind, ArgumentKind::kUndefinedTensor);
  EXPECT_EQ(undefined.tensors, 0U);
  EXPECT_NE(undefined, read_as("Tensor? x", {c10::IValue()}));
}

TEST(KeyBuilderKinds, EveryCommonDtypeHasItsOwnKey) {
  std::vector<Reading> readings;
  for (const at::ScalarType dtype :
       {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kFloat, at::kDouble,
        at::kComplexFloat, at::kComplexDouble, at::kBool, at::kBFloat16}) {
    SCOPED_TRACE(c10::toString(dtype));
    const Reading reading = read_tensor(at::zeros({4}, dtype));
    EXPECT_EQ(reading.reason, AsideReason::kNone);
    EXPECT_EQ(reading.argument().tensor.dtype, static_cast<std::uint8_t>(dtype));
    for (const Reading& other : readings) {
      EXPECT_NE(reading, other);
    }
    readings.push_back(reading);
  }
}

}  // namespace
}  // namespace eagercache
