#include "guards/key/key_fields.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "guards/key/call_key.h"
#include "tests/guards/calls.h"

namespace eagercache {

void PrintTo(const KeyFieldInfo& info, std::ostream* out) { *out << info.name; }

namespace {

using testing::make_list;
using testing::make_scalar;
using testing::make_tensor;

// Positions in the call that the mutators change: one argument of every kind.
enum Position : std::size_t {
  kNonePosition,
  kScalarTensor,  // header bits all zero but the kind: only that field can tell it from another
                  // kind
  kMatrix,
  kTensors,
  kIntPosition,
  kFloatPosition,
  kBoolPosition,
  kComplexPosition,
  kStringPosition,
  kIntsPosition,
  kDtypePosition,
  kLayoutPosition,
  kFormatPosition,
  kDevicePosition,
};

DecodedCall base_call() {
  const TensorTraits traits{.dtype = 6, .device_type = 1, .device_index = 0};
  const TensorTraits zeros{.aligned = false};
  DecodedCall call;
  call.state.autocast = true;
  call.state.autocast_dtype = 6;
  call.arguments = {testing::make_none(),
                    make_tensor(zeros, {}, {}),
                    make_tensor(traits, {8, 4}, {4, 1}),
                    make_list(ArgumentKind::kTensorList, {testing::make_none()}),
                    testing::make_int(3),
                    testing::make_float(1.5),
                    testing::make_bool(false),
                    testing::make_complex(1, 2),
                    testing::make_string("floor"),
                    make_scalar(ArgumentKind::kIntList, {1, 2}),
                    make_scalar(ArgumentKind::kScalarType, {6}),
                    make_scalar(ArgumentKind::kLayout, {0}),
                    make_scalar(ArgumentKind::kMemoryFormat, {0}),
                    testing::make_device(1, 0)};
  return call;
}

void flip(DecodedCall* call, Position position, std::size_t word = 0) {
  call->arguments[position].payload.at(word) ^= 1;
}

// Changes what `field` encodes, and nothing else. No default label: a field added to the list
// without a mutator here is a compiler warning, which the build turns into an error, and a failing
// test.
bool mutate(KeyField field, DecodedCall* call) {
  GlobalState& state = call->state;
  DecodedArgument& matrix = call->arguments[kMatrix];
  switch (field) {
    case KeyField::kStateDefaultDtype:
      state.default_dtype ^= 1;
      return true;
    case KeyField::kStateDeterministic:
      state.deterministic = true;
      return true;
    case KeyField::kStateWarnOnly:
      state.deterministic_warn_only = true;
      return true;
    case KeyField::kStateFillUninitialized:
      state.fill_uninitialized_memory = true;
      return true;
    case KeyField::kStateAutocast:
      state.autocast = !state.autocast;
      return true;
    case KeyField::kStateAutocastDtype:
      state.autocast_dtype ^= 1;
      return true;
    case KeyField::kStateNumThreads:
      state.num_threads ^= 1;
      return true;
    case KeyField::kPlainKind:
      call->arguments[kNonePosition].kind = ArgumentKind::kUndefinedTensor;
      return true;
    case KeyField::kCountedKind:
      call->arguments[kIntsPosition].kind = ArgumentKind::kFloatList;
      return true;
    case KeyField::kCountedCount:
      call->arguments[kIntsPosition].payload.push_back(0);
      return true;
    case KeyField::kTensorKind:
      call->arguments[kScalarTensor] = make_scalar(ArgumentKind::kUndefinedTensor, {});
      return true;
    case KeyField::kTensorDtype:
      matrix.tensor.dtype ^= 1;
      return true;
    case KeyField::kTensorDeviceType:
      matrix.tensor.device_type ^= 1;
      return true;
    case KeyField::kTensorDeviceIndex:
      ++matrix.tensor.device_index;
      return true;
    case KeyField::kTensorRank:
      ++matrix.tensor.dim;
      matrix.sizes.push_back(1);
      matrix.strides.push_back(1);
      return true;
    case KeyField::kTensorWrapped:
      matrix.tensor.wrapped_number = true;
      return true;
    case KeyField::kTensorAligned:
      matrix.tensor.aligned = false;
      return true;
    case KeyField::kTensorSize:
      matrix.sizes[0] += 1;
      return true;
    case KeyField::kTensorStride:
      matrix.strides[0] += 1;
      return true;
    case KeyField::kIntValue:
      flip(call, kIntPosition);
      return true;
    case KeyField::kFloatBits:
      flip(call, kFloatPosition);
      return true;
    case KeyField::kBoolValue:
      flip(call, kBoolPosition);
      return true;
    case KeyField::kComplexRealBits:
      flip(call, kComplexPosition);
      return true;
    case KeyField::kComplexImaginaryBits:
      flip(call, kComplexPosition, 1);
      return true;
    case KeyField::kStringBytes:
      call->arguments[kStringPosition].text[0] = 'F';
      return true;
    case KeyField::kElementBits:
      flip(call, kIntsPosition, 1);
      return true;
    case KeyField::kScalarTypeValue:
      flip(call, kDtypePosition);
      return true;
    case KeyField::kLayoutValue:
      flip(call, kLayoutPosition);
      return true;
    case KeyField::kMemoryFormatValue:
      flip(call, kFormatPosition);
      return true;
    case KeyField::kDeviceIndex:
      call->arguments[kDevicePosition] = testing::make_device(1, 2);
      return true;
    case KeyField::kDeviceType:
      call->arguments[kDevicePosition] = testing::make_device(0, 0);
      return true;
  }
  return false;
}

std::vector<Word> key_of(const DecodedCall& call) {
  KeyBuffer buffer;
  EXPECT_TRUE(encode_call(call, &buffer));
  return {buffer.words().begin(), buffer.words().end()};
}

class EveryKeyField : public ::testing::TestWithParam<KeyFieldInfo> {};

TEST_P(EveryKeyField, ChangedAloneChangesTheKeyItsTextAndTheDifferenceShown) {
  const KeyFieldInfo& info = GetParam();
  const DecodedCall base = base_call();
  DecodedCall changed = base;
  ASSERT_TRUE(mutate(info.field, &changed)) << info.name << " has no mutator";

  const std::vector<Word> before = key_of(base);
  const std::vector<Word> after = key_of(changed);
  ASSERT_NE(before, after) << info.name;
  // The first word that differs does so within the field's bits.
  const auto [left, right] =
      std::mismatch(before.begin(), before.end(), after.begin(), after.end());
  ASSERT_NE(left, before.end());
  EXPECT_EQ((*left ^ *right) & ~info.mask(), 0U) << info.name << " wrote outside its bits";
  // With as many words as before, it is the only one.
  if (before.size() == after.size()) {
    EXPECT_TRUE(std::equal(left + 1, before.end(), right + 1)) << info.name;
  }

  EXPECT_NE(describe_call(before), describe_call(after)) << info.name;
  EXPECT_NE(first_difference(before, after), "") << info.name;
  EXPECT_NE(hash_words(before), hash_words(after)) << info.name;
}

TEST_P(EveryKeyField, IsInThePersistentKeyExactlyWhenTheListSaysSo) {
  const KeyFieldInfo& info = GetParam();
  DecodedCall changed = base_call();
  ASSERT_TRUE(mutate(info.field, &changed));
  const bool differs = persistent_words(key_of(base_call())) != persistent_words(key_of(changed));
  EXPECT_EQ(differs, info.scope == KeyScope::kPersistent) << info.name;
}

TEST_P(EveryKeyField, NamesTheHazardItServes) { EXPECT_NE(std::string(GetParam().hazard), ""); }

INSTANTIATE_TEST_SUITE_P(KeyFields, EveryKeyField, ::testing::ValuesIn(kKeyFields),
                         [](const ::testing::TestParamInfo<KeyFieldInfo>& field) {
                           return field.param.name;
                         });

TEST(KeyFields, ABitThatNoFieldOwnsIsRejected) {
  // A state word, a None, a tensor, a counted list, a bool and a device: each class with free bits.
  const DecodedCall base = base_call();
  const std::vector<Word> words = key_of(base);
  std::size_t rejected = 0;
  for (std::size_t i = 0; i < words.size(); ++i) {
    for (unsigned bit = 0; bit < 64; ++bit) {
      std::vector<Word> flipped = words;
      flipped[i] ^= Word{1} << bit;
      DecodedCall call;
      if (decode_call(flipped, &call)) {
        EXPECT_NE(call, base) << "word " << i << ", bit " << bit << " means nothing";
      } else {
        ++rejected;
      }
    }
  }
  const auto unused = [](KeyWord word) { return 64 - std::popcount(used_bits(word)); };
  EXPECT_GE(rejected,
            static_cast<std::size_t>(unused(KeyWord::kState) + unused(KeyWord::kPlainHeader) +
                                     unused(KeyWord::kTensorHeader)));
}

}  // namespace
}  // namespace eagercache
