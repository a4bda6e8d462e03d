#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "guards/key/call_key.h"
#include "guards/key/call_key_json.h"
#include "guards/key/call_key_names.h"
#include "guards/key/key_fields.h"

// Keys as text: JSON for programs, one line for people. Whatever tells two keys apart is in both.
namespace eagercache {
namespace {

using namespace call_key_names;  // NOLINT(google-build-using-namespace): private to this file
using Json = nlohmann::ordered_json;

std::string dtype_name(std::int64_t number) { return name_of(kScalarTypeNames, number, "dtype"); }

std::string device_name(std::uint8_t type, std::int8_t index) {
  std::string name = name_of(kDeviceTypeNames, type, "device");
  if (index != -1) name += ":" + std::to_string(index);
  return name;
}

std::string hex_bits(Word bits) {
  std::array<char, 16> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), bits, 16).ptr;
  const std::string text(digits.data(), end);
  return "0x" + std::string(16 - text.size(), '0') + text;
}

// The shortest text that reads back as the same double, as Python writes it.
std::string float_text(Word bits) {
  const double value = std::bit_cast<double>(bits);
  if (std::isnan(value)) return "nan";
  std::array<char, 32> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  std::string text(digits.data(), end);
  if (text.find_first_not_of("-0123456789") == std::string::npos) text += ".0";
  return text;
}

std::string kind_name(ArgumentKind kind) {
  switch (kind) {
    case ArgumentKind::kNone:
      return "none";
    case ArgumentKind::kUndefinedTensor:
      return "undefined_tensor";
    case ArgumentKind::kTensor:
      return "tensor";
    case ArgumentKind::kTensorList:
      return "tensor_list";
    case ArgumentKind::kInt:
      return "int";
    case ArgumentKind::kFloat:
      return "float";
    case ArgumentKind::kBool:
      return "bool";
    case ArgumentKind::kComplex:
      return "complex";
    case ArgumentKind::kString:
      return "string";
    case ArgumentKind::kIntList:
      return "int_list";
    case ArgumentKind::kFloatList:
      return "float_list";
    case ArgumentKind::kBoolList:
      return "bool_list";
    case ArgumentKind::kScalarType:
      return "scalar_type";
    case ArgumentKind::kLayout:
      return "layout";
    case ArgumentKind::kMemoryFormat:
      return "memory_format";
    case ArgumentKind::kDevice:
      return "device";
    case ArgumentKind::kScalarList:
      return "scalar_list";
  }
  return "unknown";
}

Json state_json(const GlobalState& state) {
  Json json = {{"default_dtype", dtype_name(state.default_dtype)},
               {"deterministic", state.deterministic},
               {"deterministic_warn_only", state.deterministic_warn_only},
               {"fill_uninitialized_memory", state.fill_uninitialized_memory},
               {"num_threads", state.num_threads}};
  if (state.autocast) {
    json["autocast"] = dtype_name(state.autocast_dtype);
  }
  return json;
}

// JSON strings are UTF-8; other bytes are given in hexadecimal.
void add_text(const std::string& text, Json* json) {
  const Json value = text;
  try {
    (void)value.dump();
    (*json)["value"] = value;
  } catch (const Json::type_error&) {
    std::string hex;
    for (const char byte : text) hex += hex_bits(static_cast<unsigned char>(byte)).substr(16);
    (*json)["hex"] = hex;
  }
}

void add_tensor(const DecodedArgument& argument, Json* json) {
  const TensorTraits& traits = argument.tensor;
  (*json)["dtype"] = dtype_name(traits.dtype);
  (*json)["device"] = device_name(traits.device_type, traits.device_index);
  (*json)["sizes"] = argument.sizes;
  (*json)["strides"] = argument.strides;
  (*json)["wrapped"] = traits.wrapped_number;
  (*json)["aligned"] = traits.aligned;
}

void add_device(const DecodedArgument& argument, Json* json) {
  const NamedDevice device = named_device(argument);
  (*json)["type"] = device.type;
  (*json)["index"] = device.index;
  (*json)["device"] = device_name(device.type, device.index);
}

void add_list(const DecodedArgument& argument, Json* json) {
  Json values = Json::array();
  Json bits = Json::array();
  for (const Word word : argument.payload) {
    switch (argument.kind) {
      case ArgumentKind::kFloatList:
        values.push_back(float_text(word));
        bits.push_back(hex_bits(word));
        break;
      case ArgumentKind::kBoolList:
        values.push_back(word != 0);
        break;
      default:
        values.push_back(static_cast<std::int64_t>(word));
        break;
    }
  }
  (*json)["values"] = std::move(values);
  if (argument.kind == ArgumentKind::kFloatList) (*json)["bits"] = std::move(bits);
}

void add_scalar(const DecodedArgument& argument, Json* json) {
  const Word word = argument.payload.at(0);
  const auto number = static_cast<std::int64_t>(word);
  Json& value = (*json)["value"];
  switch (argument.kind) {
    case ArgumentKind::kFloat:
      value = float_text(word);
      (*json)["bits"] = hex_bits(word);
      break;
    case ArgumentKind::kBool:
      value = word != 0;
      break;
    case ArgumentKind::kComplex:
      value = {float_text(word), float_text(argument.payload.at(1))};
      (*json)["real"] = hex_bits(word);
      (*json)["imag"] = hex_bits(argument.payload.at(1));
      break;
    case ArgumentKind::kScalarType:
      value = number;
      (*json)["dtype"] = dtype_name(number);
      break;
    case ArgumentKind::kLayout:
      value = number;
      (*json)["layout"] = name_of(kLayoutNames, number, "layout");
      break;
    case ArgumentKind::kMemoryFormat:
      value = number;
      (*json)["memory_format"] = name_of(kMemoryFormatNames, number, "memory_format");
      break;
    default:
      value = number;
      break;
  }
}

Json argument_json(const DecodedArgument& argument) {
  Json json = {{"kind", kind_name(argument.kind)}};
  switch (argument.kind) {
    case ArgumentKind::kNone:
    case ArgumentKind::kUndefinedTensor:
      break;
    case ArgumentKind::kTensor:
      add_tensor(argument, &json);
      break;
    case ArgumentKind::kString:
      add_text(argument.text, &json);
      break;
    case ArgumentKind::kDevice:
      add_device(argument, &json);
      break;
    case ArgumentKind::kTensorList:
    case ArgumentKind::kScalarList: {
      Json& elements = json["elements"] = Json::array();
      for (const DecodedArgument& element : argument.elements) {
        elements.push_back(argument_json(element));
      }
      break;
    }
    case ArgumentKind::kIntList:
    case ArgumentKind::kFloatList:
    case ArgumentKind::kBoolList:
      add_list(argument, &json);
      break;
    default:
      add_scalar(argument, &json);
      break;
  }
  return json;
}

// One value as people write it: "[8, 4]", "float32", "nan".
std::string plain(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return value.dump();
  std::string text;
  for (const Json& element : value) text += (text.empty() ? "" : ", ") + plain(element);
  return "[" + text + "]";
}

// The first field in which two objects with the same keys differ, as "name left is not right".
std::string field_difference(const Json& left, const Json& right) {
  for (const auto& [name, value] : left.items()) {
    const auto other = right.find(name);
    if (other == right.end()) return name + " is not there";
    if (*other == value) continue;
    return name + " " + plain(value) + " is not " + plain(*other);
  }
  return "";
}

std::string argument_difference(const DecodedArgument& left, const DecodedArgument& right) {
  if (left.kind != right.kind) return kind_name(left.kind) + " is not " + kind_name(right.kind);
  if (left.elements.size() != right.elements.size()) {
    return std::to_string(left.elements.size()) + " elements is not " +
           std::to_string(right.elements.size());
  }
  for (std::size_t i = 0; i < left.elements.size(); ++i) {
    if (left.elements[i] == right.elements[i]) continue;
    return "element " + std::to_string(i) + ": " +
           argument_difference(left.elements[i], right.elements[i]);
  }
  return field_difference(argument_json(left), argument_json(right));
}

}  // namespace

std::string scalar_type_name(std::uint8_t dtype) { return dtype_name(dtype); }

Json call_description(std::span<const Word> words, std::span<const std::string> names) {
  DecodedCall call;
  if (!decode_call(words, &call)) return nullptr;
  Json args = Json::array();
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    Json argument = Json::object();
    if (i < names.size()) add_text(names[i], &argument);
    if (!argument.empty()) argument = {{"name", argument.begin().value()}};
    argument.update(argument_json(call.arguments[i]));
    args.push_back(std::move(argument));
  }
  return {{"state", state_json(call.state)}, {"args", std::move(args)}};
}

std::string describe_call(std::span<const Word> words, std::span<const std::string> names) {
  const Json description = call_description(words, names);
  return description.is_null() ? "" : description.dump();
}

std::string first_difference(std::span<const Word> left, std::span<const Word> right,
                             std::span<const std::string> names) {
  if (std::equal(left.begin(), left.end(), right.begin(), right.end())) return "";
  DecodedCall a;
  DecodedCall b;
  if (!decode_call(left, &a) || !decode_call(right, &b)) return "not the key of a call";
  if (a.state != b.state)
    return "state: " + field_difference(state_json(a.state), state_json(b.state));
  for (std::size_t i = 0; i < std::min(a.arguments.size(), b.arguments.size()); ++i) {
    if (a.arguments[i] == b.arguments[i]) continue;
    const std::string name = i < names.size() ? " (" + names[i] + ")" : "";
    return "argument " + std::to_string(i) + name + ": " +
           argument_difference(a.arguments[i], b.arguments[i]);
  }
  return std::to_string(a.arguments.size()) + " arguments is not " +
         std::to_string(b.arguments.size());
}

}  // namespace eagercache
