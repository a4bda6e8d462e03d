#include "guards/key/call_key.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/guards/calls.h"

namespace eagercache {
namespace {

std::vector<Word> words_of(const KeyBuffer& buffer) {
  return {buffer.words().begin(), buffer.words().end()};
}

std::vector<Word> key_of(std::vector<DecodedArgument> arguments) {
  KeyBuffer buffer;
  EXPECT_TRUE(encode_call({.state = {}, .arguments = std::move(arguments)}, &buffer));
  return words_of(buffer);
}

TEST(KeyBuffer, HasTheCapacityItStatesAndRemembersTheOverflow) {
  KeyBuffer buffer;
  const std::vector<std::int64_t> values(KeyBuffer::kCapacity - 1, 7);
  buffer.put_int_list(values.data(), values.size());
  EXPECT_FALSE(buffer.overflowed());
  EXPECT_EQ(buffer.words().size(), KeyBuffer::kCapacity);
  buffer.put_none();
  EXPECT_TRUE(buffer.overflowed());
  EXPECT_EQ(buffer.words().size(), KeyBuffer::kCapacity);
  buffer.clear();
  EXPECT_FALSE(buffer.overflowed());
  EXPECT_TRUE(buffer.words().empty());
}

TEST(KeyBuffer, AnOverflowIsNotForgottenByASmallerArgumentThatFits) {
  KeyBuffer buffer;
  const std::vector<std::int64_t> values(KeyBuffer::kCapacity, 7);
  buffer.put_int_list(values.data(), values.size());
  buffer.put_none();
  EXPECT_TRUE(buffer.overflowed());
}

TEST(KeyBuffer, EveryKindOverflowsRatherThanWriteTooFar) {
  const std::int64_t sizes[] = {1, 2};
  const std::string text(KeyBuffer::kCapacity * sizeof(Word), 'x');
  KeyBuffer buffer;
  const auto overflows = [&buffer](auto put) {
    buffer.clear();
    const std::vector<std::int64_t> filling(KeyBuffer::kCapacity - 1, 0);
    buffer.put_int_list(filling.data(), filling.size());
    put();
    return buffer.overflowed() && buffer.words().size() == KeyBuffer::kCapacity;
  };
  EXPECT_TRUE(overflows([&] { buffer.put_state({}); }));
  EXPECT_TRUE(overflows([&] { buffer.put_none(); }));
  EXPECT_TRUE(overflows([&] { buffer.put_undefined_tensor(); }));
  EXPECT_TRUE(overflows([&] { buffer.put_tensor({.dim = 2}, sizes, sizes); }));
  EXPECT_TRUE(overflows([&] { buffer.put_tensor_list(1); }));
  EXPECT_TRUE(overflows([&] { buffer.put_scalar_list(std::size_t{1} << 40); }));
  EXPECT_TRUE(overflows([&] { buffer.put_int(1); }));
  EXPECT_TRUE(overflows([&] { buffer.put_float(1); }));
  EXPECT_TRUE(overflows([&] { buffer.put_bool(true); }));
  EXPECT_TRUE(overflows([&] { buffer.put_complex(1, 2); }));
  EXPECT_TRUE(overflows([&] { buffer.put_string(text); }));
  EXPECT_TRUE(overflows([&] { buffer.put_word(1); }));
  EXPECT_TRUE(overflows([&] { buffer.put_device(1, 0); }));
}

TEST(KeyBuffer, ADeviceOutOfRangeStepsAsideInsteadOfBeingCutOff) {
  for (const auto& [type, index] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{256, 0}, {-1, 0}, {1, 128}, {1, -129}}) {
    KeyBuffer buffer;
    buffer.put_device(type, index);
    EXPECT_TRUE(buffer.overflowed()) << type << ":" << index;
  }
}

TEST(CallKey, OneTensorIsAHeaderThenSizesThenStrides) {
  const std::int64_t sizes[] = {8, 4};
  const std::int64_t strides[] = {4, 1};
  KeyBuffer buffer;
  buffer.put_state({});
  buffer.put_tensor({.dtype = 6, .dim = 2}, sizes, strides);
  ASSERT_EQ(buffer.words().size(), 6U);
  EXPECT_EQ((std::vector<Word>{8, 4, 4, 1}),
            (std::vector<Word>(buffer.words().begin() + 2, buffer.words().end())));
}

TEST(CallKey, ScalarsOfDifferentTypeAndEqualValueDiffer) {
  const std::vector<std::vector<Word>> keys = {key_of({testing::make_int(1)}),
                                               key_of({testing::make_bool(true)}),
                                               key_of({testing::make_float(1.0)}),
                                               key_of({testing::make_complex(1.0, 0.0)}),
                                               key_of({testing::make_int(0x3ff0000000000000)}),
                                               key_of({testing::make_float(0.0)}),
                                               key_of({testing::make_float(-0.0)}),
                                               key_of({testing::make_complex(0.0, 1.0)}),
                                               key_of({testing::make_complex(-0.0, 1.0)})};
  for (std::size_t i = 0; i < keys.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(keys[i], keys[j]) << i << " and " << j;
  }
}

TEST(CallKey, ANanEqualsItselfAndNoOtherNan) {
  const double nan = std::bit_cast<double>(Word{0x7ff8000000000000});
  const double other = std::bit_cast<double>(Word{0x7ff8000000000001});
  EXPECT_EQ(key_of({testing::make_float(nan)}), key_of({testing::make_float(nan)}));
  EXPECT_NE(key_of({testing::make_float(nan)}), key_of({testing::make_float(other)}));
}

TEST(CallKey, EveryDeviceIndexSurvives) {
  for (int index = -128; index <= 127; ++index) {
    const auto narrow = static_cast<std::int8_t>(index);
    const DecodedCall call{
        .state = {},
        .arguments = {testing::make_tensor({.device_type = 1, .device_index = narrow}, {}, {}),
                      testing::make_device(1, narrow)}};
    KeyBuffer buffer;
    ASSERT_TRUE(encode_call(call, &buffer)) << index;
    DecodedCall decoded;
    ASSERT_TRUE(decode_call(buffer.words(), &decoded));
    EXPECT_EQ(decoded, call) << index;
  }
}

TEST(CallKey, ThePersistentKeyForgetsWhichDeviceOfATypeItWas) {
  const auto key = [](std::uint8_t type, std::int8_t index) {
    return persistent_words(
        key_of({testing::make_tensor({.device_type = type, .device_index = index}, {2}, {1}),
                testing::make_device(type, index)}));
  };
  EXPECT_EQ(key(1, 0), key(1, 3));
  EXPECT_EQ(key(1, 0), key(1, -1));
  EXPECT_NE(key(1, 0), key(0, 0));
  DecodedCall call;
  ASSERT_TRUE(decode_call(key(1, 3), &call));
  EXPECT_EQ(call.arguments[0].tensor.device_index, -1);
}

TEST(CallKey, ACallThatWouldNotSurviveIsNotEncoded) {
  const auto refuses = [](const DecodedArgument& argument) {
    KeyBuffer buffer;
    return !encode_call({.state = {}, .arguments = {argument}}, &buffer);
  };
  DecodedArgument none_with_text = testing::make_none();
  none_with_text.text = "x";
  EXPECT_TRUE(refuses(none_with_text));
  DecodedArgument short_strides = testing::make_tensor({}, {2, 3}, {3, 1});
  short_strides.strides.pop_back();
  EXPECT_TRUE(refuses(short_strides));
  EXPECT_TRUE(refuses(testing::make_scalar(ArgumentKind::kInt, {})));
  EXPECT_TRUE(refuses(testing::make_scalar(ArgumentKind::kBool, {2})));
  EXPECT_TRUE(refuses(testing::make_scalar(ArgumentKind::kBoolList, {2})));
  EXPECT_TRUE(refuses(testing::make_scalar(ArgumentKind::kDevice, {1 << 16})));
  EXPECT_TRUE(refuses(testing::make_list(ArgumentKind::kTensorList, {testing::make_int(1)})));
  EXPECT_TRUE(refuses(testing::make_list(ArgumentKind::kScalarList, {testing::make_none()})));
  EXPECT_TRUE(refuses(testing::make_string(std::string(8 * KeyBuffer::kCapacity, 'x'))));
  EXPECT_FALSE(refuses(testing::make_string("x")));
}

TEST(CallKey, WordsOfNoCallAreNotDecoded) {
  DecodedCall call;
  EXPECT_FALSE(decode_call({}, &call));
  EXPECT_FALSE(decode_call(std::vector<Word>{0, 0}, &call));     // kind 0
  EXPECT_FALSE(decode_call(std::vector<Word>{0, 18}, &call));    // kind unknown
  EXPECT_FALSE(decode_call(std::vector<Word>{0, 5}, &call));     // an int without its value
  EXPECT_FALSE(decode_call(std::vector<Word>{0, 7, 2}, &call));  // a bool of 2
  EXPECT_FALSE(decode_call(std::vector<Word>{Word{1} << 63, 1}, &call));  // a state bit unknown
  const Word text_of_one = Word{1} << 32 | 9;
  EXPECT_TRUE(decode_call(std::vector<Word>{0, text_of_one, 'x'}, &call));
  EXPECT_FALSE(decode_call(std::vector<Word>{0, text_of_one, 'x' << 8}, &call));  // padding
  const Word forged_count = Word{0xffffffff} << 32 | 4;
  EXPECT_FALSE(decode_call(std::vector<Word>{0, forged_count, 1}, &call));
  EXPECT_TRUE(call.arguments.empty());
  EXPECT_FALSE(decode_call(std::vector<Word>(KeyBuffer::kCapacity + 1, 1), &call));
}

}  // namespace
}  // namespace eagercache
