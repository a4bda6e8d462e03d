#include <gtest/gtest.h>

#include <iostream>
#include <string>
#include <unordered_map>
#include <vector>

#include "guards/key/call_key.h"
#include "tests/guards/calls.h"
#include "tests/support/sweep.h"

namespace eagercache {
namespace {

using testing::RandomCalls;

constexpr std::uint64_t kSeed = 20260817;

std::string bytes_of(std::span<const Word> words) {
  return {reinterpret_cast<const char*>(words.data()), words.size_bytes()};
}

// One map holds the key of every call met, across all schemas, in both directions. With n different
// calls that is n(n-1)/2 pairs of different calls.
TEST(CallKeyProperty, DifferentCallsHaveDifferentKeysAndEqualCallsEqualOnes) {
  RandomCalls random(kSeed);
  std::unordered_map<std::string, std::string> key_of_call;
  std::unordered_map<std::string, std::string> call_of_key;
  std::size_t repeated = 0;
  KeyBuffer buffer;
  const std::size_t step = sweep_step(5);
  for (std::size_t i = 0; i < 100000; i += step) {
    const auto& schemas = RandomCalls::schemas();
    const DecodedCall call = random.call(schemas[random.below(schemas.size())]);
    testing::put_call(call, &buffer);
    ASSERT_FALSE(buffer.overflowed());
    const std::string text = testing::call_text(call);
    const std::string key = bytes_of(buffer.words());
    const auto [by_call, new_call] = key_of_call.emplace(text, key);
    const auto [by_key, new_key] = call_of_key.emplace(key, text);
    ASSERT_EQ(by_call->second, key) << "seed " << kSeed << ": one call, two keys: " << text;
    ASSERT_EQ(by_key->second, text) << "seed " << kSeed << ": two calls, one key";
    repeated += !new_call;
  }
  const std::size_t different = key_of_call.size();
  const std::size_t pairs = different * (different - 1) / 2;
  std::cout << "seed " << kSeed << ": " << pairs << " pairs of different calls, " << repeated
            << " repeated calls\n";
  EXPECT_GE(pairs, 1000000U);
  EXPECT_GT(repeated, 1000U / step);
}

TEST(CallKeyProperty, DecodingGivesTheCallBackAndEncodingItGivesTheKeyBack) {
  RandomCalls random(kSeed + 1);
  KeyBuffer buffer;
  KeyBuffer again;
  for (int i = 0; i < 20000; ++i) {
    const auto& schemas = RandomCalls::schemas();
    const DecodedCall call = random.call(schemas[random.below(schemas.size())]);
    testing::put_call(call, &buffer);
    DecodedCall decoded;
    ASSERT_TRUE(decode_call(buffer.words(), &decoded)) << "seed " << kSeed + 1 << ", call " << i;
    ASSERT_EQ(decoded, call) << "seed " << kSeed + 1 << ", call " << i;
    ASSERT_TRUE(encode_call(decoded, &again));
    ASSERT_EQ(bytes_of(again.words()), bytes_of(buffer.words()));
  }
}

TEST(CallKeyProperty, ReadingADescriptionGivesTheKeyBack) {
  RandomCalls random(kSeed + 2);
  KeyBuffer buffer;
  KeyBuffer again;
  const std::size_t step = sweep_step(10);
  std::size_t read = 0;
  for (std::size_t i = 0; i < 20000; i += step) {
    const auto& schemas = RandomCalls::schemas();
    const DecodedCall call = random.call(schemas[random.below(schemas.size())]);
    testing::put_call(call, &buffer);
    const std::string text = describe_call(buffer.words());
    std::string problem;
    if (parse_call(text, &again, &problem)) {
      ASSERT_EQ(bytes_of(again.words()), bytes_of(buffer.words())) << text;
      ++read;
    } else {
      // Only what has no name is not read back.
      ASSERT_NE(text.find('<'), std::string::npos) << "seed " << kSeed + 2 << ": " << problem;
    }
  }
  EXPECT_GT(read, 5000U / step);
}

// Changes exactly one thing of a tensor, the `which`th.
bool nudge_tensor(RandomCalls& random, std::size_t which, DecodedArgument* argument) {
  TensorTraits& traits = argument->tensor;
  const bool scalar = argument->sizes.empty();
  const std::size_t at = scalar ? 0 : random.below(argument->sizes.size());
  switch (which) {
    case 0:
      traits.dtype ^= 1;
      return true;
    case 1:
      traits.device_type ^= 1;
      return true;
    case 2:
      ++traits.device_index;
      return true;
    case 3:
      traits.wrapped_number = !traits.wrapped_number;
      return true;
    case 4:
      traits.aligned = !traits.aligned;
      return true;
    case 5:
      if (scalar) return false;
      argument->sizes[at] += 1;
      return true;
    case 6:
      if (scalar) return false;
      argument->strides[at] += 1;
      return true;
    default:  // unsqueeze(0)
      argument->sizes.insert(argument->sizes.begin(), 1);
      argument->strides.insert(argument->strides.begin(), 1);
      ++traits.dim;
      return true;
  }
}

// The same bits under another kind: 1 and True, 5e-324 and 1, [1] and [True].
bool retag(DecodedArgument* argument) {
  switch (argument->kind) {
    case ArgumentKind::kInt:
      argument->kind = ArgumentKind::kFloat;
      return true;
    case ArgumentKind::kFloat:
      argument->kind = ArgumentKind::kInt;
      return true;
    case ArgumentKind::kBool:
      argument->kind = ArgumentKind::kInt;
      return true;
    case ArgumentKind::kIntList:
      argument->kind = ArgumentKind::kFloatList;
      return true;
    case ArgumentKind::kFloatList:
    case ArgumentKind::kBoolList:
      argument->kind = ArgumentKind::kIntList;
      return true;
    case ArgumentKind::kScalarType:
      argument->kind = ArgumentKind::kLayout;
      return true;
    case ArgumentKind::kLayout:
      argument->kind = ArgumentKind::kMemoryFormat;
      return true;
    case ArgumentKind::kNone:
      argument->kind = ArgumentKind::kUndefinedTensor;
      return true;
    case ArgumentKind::kUndefinedTensor:
      argument->kind = ArgumentKind::kNone;
      return true;
    default:
      return false;
  }
}

// Changes exactly one thing; false when this argument has no such thing.
bool nudge(RandomCalls& random, DecodedArgument* argument) {
  if (!argument->elements.empty() && random.below(2) == 0) {
    DecodedArgument& element = argument->elements[random.below(argument->elements.size())];
    if (random.below(4) != 0) return nudge(random, &element);
    if (argument->kind != ArgumentKind::kTensorList || element.kind == ArgumentKind::kNone) {
      return false;
    }
    element = testing::make_none();  // a hole
    return true;
  }
  if (argument->kind == ArgumentKind::kTensor) {
    return nudge_tensor(random, random.below(8), argument);
  }
  if (argument->kind == ArgumentKind::kTensorList) {
    argument->elements.push_back(testing::make_none());
    return true;
  }
  if (argument->kind == ArgumentKind::kScalarList) {
    argument->elements.push_back(testing::make_int(0));
    return true;
  }
  if (argument->kind == ArgumentKind::kString) {
    argument->text.push_back('\0');
    return true;
  }
  if (random.below(2) == 0 || argument->payload.empty()) return retag(argument);
  const bool one_bit =
      argument->kind == ArgumentKind::kBool || argument->kind == ArgumentKind::kBoolList;
  const std::size_t bits = argument->kind == ArgumentKind::kDevice ? 16 : one_bit ? 1 : 64;
  argument->payload[random.below(argument->payload.size())] ^= Word{1} << random.below(bits);
  return true;
}

TEST(CallKeyProperty, CallsThatDifferInExactlyOneThingHaveDifferentKeys) {
  RandomCalls random(kSeed + 2);
  KeyBuffer buffer;
  KeyBuffer other;
  const std::size_t wanted = 1000000 / sweep_step(20);
  std::size_t pairs = 0;
  while (pairs < wanted) {
    const auto& schemas = RandomCalls::schemas();
    DecodedCall call = random.call(schemas[random.below(schemas.size())]);
    testing::put_call(call, &buffer);
    const std::string text = testing::call_text(call);
    for (DecodedArgument& argument : call.arguments) {
      const DecodedArgument before = argument;
      if (nudge(random, &argument)) {
        testing::put_call(call, &other);
        ++pairs;
        ASSERT_NE(bytes_of(other.words()), bytes_of(buffer.words())) << "seed " << kSeed + 2 << "\n"
                                                                     << text << "\n"
                                                                     << testing::call_text(call);
      }
      argument = before;
    }
  }
  std::cout << "seed " << kSeed + 2 << ": " << pairs << " pairs that differ in one thing\n";
}

TEST(CallKeyProperty, PositionsAreAbsoluteAndTrailingNonesCount) {
  const auto key = [](std::vector<DecodedArgument> arguments) {
    KeyBuffer buffer;
    testing::put_call({.state = {}, .arguments = std::move(arguments)}, &buffer);
    return bytes_of(buffer.words());
  };
  const DecodedArgument none = testing::make_none();
  const DecodedArgument one = testing::make_int(1);
  const std::vector<std::string> keys = {key({}),          key({none}),      key({one}),
                                         key({one, none}), key({none, one}), key({one, one}),
                                         key({none, none})};
  for (std::size_t i = 0; i < keys.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(keys[i], keys[j]) << i << " and " << j;
  }
}

// Words near a true key, so that the decoder gets past the first one.
std::vector<Word> mangled(RandomCalls& random, std::span<const Word> words) {
  std::vector<Word> result(words.begin(), words.end());
  for (std::size_t edits = 1 + random.below(3); edits != 0; --edits) {
    const std::size_t at = random.below(result.size());
    switch (random.below(6)) {
      case 0:
        result[at] ^= Word{1} << random.below(64);
        break;
      case 1:
        result[at] = random.word();
        break;
      case 2:
        result[at] = random.below(20);
        break;
      case 3:
        result[at] = Word{random.below(8)} << 32 | random.below(20);
        break;
      case 4:
        result.resize(at + 1);
        break;
      default:
        result.insert(result.begin() + static_cast<std::ptrdiff_t>(at), random.below(20));
    }
  }
  return result;
}

TEST(CallKeyProperty, DecodingAnyWordsIsSafeAndAcceptsOnlyWhatEncodesBack) {
  RandomCalls random(kSeed + 3);
  KeyBuffer buffer;
  std::size_t accepted = 0;
  const std::size_t step = sweep_step(10);
  for (std::size_t i = 0; i < 60000; i += step) {
    const auto& schemas = RandomCalls::schemas();
    testing::put_call(random.call(schemas[random.below(schemas.size())]), &buffer);
    const std::vector<Word> words = mangled(random, buffer.words());
    DecodedCall call;
    const bool accepts = decode_call(words, &call);
    EXPECT_EQ(describe_call(words).empty(), !accepts);
    EXPECT_EQ(persistent_words(words).size(), accepts ? words.size() : 0);
    if (!accepts) continue;
    ++accepted;
    ASSERT_TRUE(encode_call(call, &buffer)) << "seed " << kSeed + 3 << ", input " << i;
    ASSERT_EQ(bytes_of(buffer.words()), bytes_of(words)) << "seed " << kSeed + 3 << ", input " << i;
  }
  std::cout << "seed " << kSeed + 3 << ": " << accepted << " accepted\n";
  EXPECT_GT(accepted, 1000U / step);
}

}  // namespace
}  // namespace eagercache
