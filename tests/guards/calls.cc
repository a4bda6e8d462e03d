#include "tests/guards/calls.h"

#include <array>
#include <limits>

namespace eagercache::testing {

const std::vector<std::vector<Parameter>>& RandomCalls::schemas() {
  using P = Parameter;
  static const std::vector<std::vector<Parameter>> kSchemas = {
      {P::kTensor},                                                                   // abs
      {P::kTensor, P::kTensor, P::kScalar},                                           // add
      {P::kTensor, P::kScalar, P::kScalar},                                           // add.Scalar
      {P::kTensorList, P::kInt},                                                      // cat
      {P::kTensor, P::kOptionalTensorList},                                           // index
      {P::kTensor, P::kOptionalScalar, P::kOptionalScalar},                           // clamp
      {P::kTensor, P::kOptionalIntList, P::kBool, P::kOptionalScalarType},            // sum.dim
      {P::kTensor, P::kOptionalIntList, P::kOptionalScalar, P::kBool},                // var
      {P::kTensor, P::kTensor, P::kOptionalString},                                   // div.mode
      {P::kTensor, P::kOptionalIntList, P::kBool, P::kOptionalFloat, P::kFloatList},  // upsample
      {P::kTensorList, P::kScalarList},                                               // _foreach_
      {P::kTensor, P::kOptionalTensor, P::kOptionalTensor, P::kBoolList},             // backward
      {P::kTensor, P::kOptionalScalarType, P::kOptionalLayout, P::kOptionalDevice, P::kBool,
       P::kOptionalMemoryFormat},  // to
  };
  return kSchemas;
}

std::int64_t RandomCalls::integer() {
  constexpr std::array<std::int64_t, 10> kPool = {0,
                                                  1,
                                                  -1,
                                                  2,
                                                  std::numeric_limits<std::int64_t>::max(),
                                                  std::numeric_limits<std::int64_t>::min(),
                                                  (std::int64_t{1} << 53) + 1,
                                                  0x3ff0000000000000,  // the bits of 1.0
                                                  std::numeric_limits<std::int64_t>::min() + 1,
                                                  6};
  return chance(16) ? static_cast<std::int64_t>(word()) : kPool[below(kPool.size())];
}

double RandomCalls::real() {
  constexpr std::array<Word, 10> kPool = {0x0000000000000000,   // 0.0
                                          0x8000000000000000,   // -0.0
                                          0x3ff0000000000000,   // 1.0
                                          0x7ff8000000000000,   // NaN
                                          0xfff8000000000000,   // NaN with a sign
                                          0x7ff8000000000001,   // NaN with a payload
                                          0x7ff0000000000000,   // infinity
                                          0x0000000000000001,   // least denormal
                                          0x4000000000000000,   // 2.0
                                          0x7fefffffffffffff};  // greatest finite
  return std::bit_cast<double>(chance(16) ? word() : kPool[below(kPool.size())]);
}

DecodedArgument RandomCalls::scalar() {
  switch (below(4)) {
    case 0:
      return make_int(integer());
    case 1:
      return make_float(real());
    case 2:
      return make_bool(chance(2));
    default:
      return make_complex(real(), real());
  }
}

DecodedArgument RandomCalls::tensor() {
  constexpr std::array<std::uint8_t, 5> kDtypes = {6, 7, 4, 11, 15};
  TensorTraits traits;
  traits.dtype = kDtypes[below(kDtypes.size())];
  traits.device_type = static_cast<std::uint8_t>(below(2));
  traits.device_index = static_cast<std::int8_t>(traits.device_type == 0 ? -1 : below(3));
  traits.aligned = !chance(4);
  constexpr std::array<std::int64_t, 5> kSizes = {1, 2, 8, 1, 3};
  std::vector<std::int64_t> sizes(below(4));
  for (std::int64_t& size : sizes) size = kSizes[below(kSizes.size())];
  traits.wrapped_number = sizes.empty() && chance(2);
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t next = 1;
  const bool reversed = chance(3);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::size_t at = reversed ? i : sizes.size() - 1 - i;
    strides[at] = chance(8) ? 0 : next;
    // A dimension of size 1 may have any stride.
    if (sizes[at] == 1 && chance(3)) strides[at] = static_cast<std::int64_t>(below(5));
    next *= sizes[at];
  }
  return make_tensor(traits, sizes, strides);
}

DecodedArgument RandomCalls::argument(Parameter parameter) {
  const auto words = [this](ArgumentKind kind, auto make) {
    std::vector<Word> payload(below(4));
    for (Word& element : payload) element = make();
    return make_scalar(kind, payload);
  };
  const auto elements = [this](ArgumentKind kind, auto make) {
    std::vector<DecodedArgument> list(below(4));
    for (DecodedArgument& element : list) element = make();
    return make_list(kind, list);
  };
  switch (parameter) {
    case Parameter::kTensor:
      return tensor();
    case Parameter::kOptionalTensor:
      return chance(3) ? make_none() : chance(3) ? make_undefined() : tensor();
    case Parameter::kTensorList:
      return elements(ArgumentKind::kTensorList, [this] { return tensor(); });
    case Parameter::kOptionalTensorList:
      return elements(ArgumentKind::kTensorList,
                      [this] { return argument(Parameter::kOptionalTensor); });
    case Parameter::kScalar:
      return scalar();
    case Parameter::kOptionalScalar:
      return chance(3) ? make_none() : scalar();
    case Parameter::kInt:
      return make_int(integer());
    case Parameter::kBool:
      return make_bool(chance(2));
    case Parameter::kOptionalFloat:
      return chance(3) ? make_none() : make_float(real());
    case Parameter::kOptionalIntList:
      if (chance(3)) return make_none();
      return words(ArgumentKind::kIntList, [this] { return static_cast<Word>(integer()); });
    case Parameter::kFloatList:
      return words(ArgumentKind::kFloatList, [this] { return std::bit_cast<Word>(real()); });
    case Parameter::kBoolList:
      return words(ArgumentKind::kBoolList, [this] { return Word{below(2)}; });
    case Parameter::kOptionalString: {
      const std::array<std::string, 8> pool = {
          "",  "floor",    "trunc",     std::string("a\0", 2),
          "a", "12345678", "123456789", std::string("12345678\0", 9)};
      return chance(4) ? make_none() : make_string(pool[below(pool.size())]);
    }
    case Parameter::kOptionalScalarType:
      return chance(3) ? make_none() : make_scalar(ArgumentKind::kScalarType, {below(12)});
    case Parameter::kOptionalLayout:
      return chance(3) ? make_none() : make_scalar(ArgumentKind::kLayout, {below(3)});
    case Parameter::kOptionalDevice:
      if (chance(3)) return make_none();
      return make_device(static_cast<std::uint8_t>(below(2)),
                         static_cast<std::int8_t>(below(3)) - 1);
    case Parameter::kOptionalMemoryFormat:
      return chance(3) ? make_none() : make_scalar(ArgumentKind::kMemoryFormat, {below(4)});
    case Parameter::kScalarList:
      return elements(ArgumentKind::kScalarList, [this] { return scalar(); });
  }
  return {};
}

DecodedCall RandomCalls::call(const std::vector<Parameter>& schema) {
  DecodedCall call;
  call.state.default_dtype = chance(4) ? 7 : 6;
  call.state.deterministic = chance(6);
  call.state.deterministic_warn_only = chance(6);
  call.state.fill_uninitialized_memory = chance(6);
  call.state.num_threads = static_cast<std::uint16_t>(chance(4) ? below(65536) : 1);
  call.state.autocast = chance(6);
  call.state.autocast_dtype = call.state.autocast ? std::uint8_t(chance(2) ? 15 : 5) : 0;
  for (const Parameter parameter : schema) call.arguments.push_back(argument(parameter));
  return call;
}

namespace {

void put_argument(const DecodedArgument& argument, KeyBuffer* buffer) {
  const auto number = [&](std::size_t i = 0) {
    return static_cast<std::int64_t>(argument.payload.at(i));
  };
  const auto real = [&](std::size_t i = 0) {
    return std::bit_cast<double>(argument.payload.at(i));
  };
  switch (argument.kind) {
    case ArgumentKind::kNone:
      return buffer->put_none();
    case ArgumentKind::kUndefinedTensor:
      return buffer->put_undefined_tensor();
    case ArgumentKind::kTensor:
      return buffer->put_tensor(argument.tensor, argument.sizes.data(), argument.strides.data());
    case ArgumentKind::kInt:
      return buffer->put_int(number());
    case ArgumentKind::kFloat:
      return buffer->put_float(real());
    case ArgumentKind::kBool:
      return buffer->put_bool(number() != 0);
    case ArgumentKind::kComplex:
      return buffer->put_complex(real(0), real(1));
    case ArgumentKind::kString:
      return buffer->put_string(argument.text);
    case ArgumentKind::kScalarType:
      return buffer->put_scalar_type(number());
    case ArgumentKind::kLayout:
      return buffer->put_layout(number());
    case ArgumentKind::kMemoryFormat:
      return buffer->put_memory_format(number());
    case ArgumentKind::kDevice:
      return buffer->put_device(number() >> 8, (number() & 255) - 1);
    case ArgumentKind::kIntList: {
      const std::vector<std::int64_t> values(argument.payload.begin(), argument.payload.end());
      return buffer->put_int_list(values.data(), values.size());
    }
    case ArgumentKind::kFloatList: {
      std::vector<double> values;
      for (const Word bits : argument.payload) values.push_back(std::bit_cast<double>(bits));
      return buffer->put_float_list(values.data(), values.size());
    }
    case ArgumentKind::kBoolList:
      buffer->put_bool_list_header(argument.payload.size());
      for (const Word element : argument.payload) buffer->put_word(element);
      return;
    case ArgumentKind::kTensorList:
      buffer->put_tensor_list(argument.elements.size());
      break;
    case ArgumentKind::kScalarList:
      buffer->put_scalar_list(argument.elements.size());
      break;
  }
  for (const DecodedArgument& element : argument.elements) put_argument(element, buffer);
}

void add(std::uint64_t value, std::string* text) { *text += std::to_string(value) + ","; }

void add_text(const DecodedArgument& argument, std::string* text) {
  add(static_cast<std::uint64_t>(argument.kind), text);
  const TensorTraits& traits = argument.tensor;
  for (const int value : {int{traits.dtype}, int{traits.device_type}, int{traits.device_index},
                          int{traits.wrapped_number}, int{traits.aligned}}) {
    *text += std::to_string(value) + ",";
  }
  for (const auto* list : {&argument.sizes, &argument.strides}) {
    *text += "(";
    for (const std::int64_t value : *list) add(static_cast<std::uint64_t>(value), text);
    *text += ")";
  }
  *text += "<";
  for (const Word value : argument.payload) add(value, text);
  *text += ">" + std::to_string(argument.text.size()) + "'" + argument.text + "'{";
  for (const DecodedArgument& element : argument.elements) add_text(element, text);
  *text += "}";
}

}  // namespace

void put_call(const DecodedCall& call, KeyBuffer* buffer) {
  buffer->clear();
  buffer->put_state(call.state);
  for (const DecodedArgument& argument : call.arguments) put_argument(argument, buffer);
}

std::string call_text(const DecodedCall& call) {
  std::string text;
  const GlobalState& state = call.state;
  for (const int value : {int{state.default_dtype}, int{state.deterministic},
                          int{state.deterministic_warn_only}, int{state.fill_uninitialized_memory},
                          int{state.num_threads}, int{state.autocast}, int{state.autocast_dtype}}) {
    add(static_cast<std::uint64_t>(value), &text);
  }
  for (const DecodedArgument& argument : call.arguments) {
    text += "|";
    add_text(argument, &text);
  }
  return text;
}

}  // namespace eagercache::testing
