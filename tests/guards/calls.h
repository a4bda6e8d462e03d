#pragma once

#include <bit>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "guards/key/call_key.h"

// Calls as the tests write them, and random ones over schemas that ATen has.
namespace eagercache::testing {

inline DecodedArgument make_scalar(ArgumentKind kind, std::vector<Word> payload) {
  DecodedArgument argument;
  argument.kind = kind;
  argument.payload = std::move(payload);
  return argument;
}
inline DecodedArgument make_none() { return {}; }
inline DecodedArgument make_undefined() { return make_scalar(ArgumentKind::kUndefinedTensor, {}); }
inline DecodedArgument make_int(std::int64_t value) {
  return make_scalar(ArgumentKind::kInt, {static_cast<Word>(value)});
}
inline DecodedArgument make_float(double value) {
  return make_scalar(ArgumentKind::kFloat, {std::bit_cast<Word>(value)});
}
inline DecodedArgument make_bool(bool value) { return make_scalar(ArgumentKind::kBool, {value}); }
inline DecodedArgument make_complex(double real, double imaginary) {
  return make_scalar(ArgumentKind::kComplex,
                     {std::bit_cast<Word>(real), std::bit_cast<Word>(imaginary)});
}
inline DecodedArgument make_device(std::uint8_t type, std::int8_t index) {
  return make_scalar(ArgumentKind::kDevice,
                     {Word{type} << 8 | static_cast<std::uint8_t>(index + 1)});
}
inline DecodedArgument make_string(std::string text) {
  DecodedArgument argument;
  argument.kind = ArgumentKind::kString;
  argument.text = std::move(text);
  return argument;
}
inline DecodedArgument make_list(ArgumentKind kind, std::vector<DecodedArgument> elements) {
  DecodedArgument argument;
  argument.kind = kind;
  argument.elements = std::move(elements);
  return argument;
}
inline DecodedArgument make_tensor(TensorTraits traits, std::vector<std::int64_t> sizes,
                                   std::vector<std::int64_t> strides) {
  DecodedArgument argument;
  argument.kind = ArgumentKind::kTensor;
  argument.tensor = traits;
  argument.tensor.dim = static_cast<std::uint8_t>(sizes.size());
  argument.sizes = std::move(sizes);
  argument.strides = std::move(strides);
  return argument;
}

// What an argument of a schema may be.
enum class Parameter {
  kTensor,
  kOptionalTensor,
  kTensorList,
  kOptionalTensorList,
  kScalar,
  kOptionalScalar,
  kInt,
  kBool,
  kOptionalFloat,
  kOptionalIntList,
  kFloatList,
  kBoolList,
  kOptionalString,
  kOptionalScalarType,
  kOptionalLayout,
  kOptionalDevice,
  kOptionalMemoryFormat,
  kScalarList,
};

class RandomCalls {
 public:
  explicit RandomCalls(std::uint64_t seed) : random_(seed) {}

  static const std::vector<std::vector<Parameter>>& schemas();

  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(random_() % bound); }
  DecodedCall call(const std::vector<Parameter>& schema);
  DecodedArgument argument(Parameter parameter);
  DecodedArgument scalar();
  DecodedArgument tensor();
  std::int64_t integer();
  double real();
  Word word() { return random_(); }

 private:
  bool chance(std::size_t of) { return below(of) == 0; }
  std::mt19937_64 random_;
};

// Writes a call with the interface that the key builder uses, not with encode_call().
void put_call(const DecodedCall& call, KeyBuffer* buffer);

// A text that tells any two different calls apart, made without the code under test.
std::string call_text(const DecodedCall& call);

}  // namespace eagercache::testing
