#include <charconv>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "guards/key/call_key.h"
#include "guards/key/call_key_names.h"
#include "guards/key/key_fields.h"

// A call out of its text. Whatever describe_call() writes is read here; names win over the numbers
// beside them, so that a text may be written by hand.
namespace eagercache {
namespace {

using namespace call_key_names;  // NOLINT(google-build-using-namespace): private to this file
using ParsedJson = nlohmann::json;

// What is wrong with the text; caught by parse_call().
class BadText : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <std::size_t kCount>
std::int64_t number_of(const std::array<const char*, kCount>& names, const std::string& name,
                       const char* what) {
  for (std::size_t i = 0; i < kCount; ++i) {
    if (name == names[i]) return static_cast<std::int64_t>(i);
  }
  throw BadText("unknown " + std::string(what) + " '" + name + "'");
}

// By its name, else by its number.
template <std::size_t kCount>
Word named_word(const ParsedJson& json, const std::array<const char*, kCount>& names,
                const char* what) {
  if (json.contains(what)) {
    return static_cast<Word>(number_of(names, json.at(what).get<std::string>(), what));
  }
  return static_cast<Word>(json.at("value").get<std::int64_t>());
}

std::uint8_t dtype_number(const ParsedJson& json) {
  return static_cast<std::uint8_t>(number_of(kScalarTypeNames, json.get<std::string>(), "dtype"));
}

struct Device {
  std::uint8_t type = 0;
  std::int8_t index = -1;
};

Device device_of(const std::string& text) {
  const std::size_t colon = text.find(':');
  Device device;
  device.type =
      static_cast<std::uint8_t>(number_of(kDeviceTypeNames, text.substr(0, colon), "device"));
  if (colon != std::string::npos) {
    int index = -1;
    const char* const end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + colon + 1, end, index);
    if (parsed.ec != std::errc() || parsed.ptr != end || index < 0 || index > INT8_MAX) {
      throw BadText("unknown device '" + text + "'");
    }
    device.index = static_cast<std::int8_t>(index);
  }
  return device;
}

Word bits_of(const ParsedJson& json) {
  const std::string text = json.get<std::string>();
  Word bits = 0;
  const char* const end = text.data() + text.size();
  if (!text.starts_with("0x")) throw BadText("'" + text + "' is not the bits of a number");
  const auto parsed = std::from_chars(text.data() + 2, end, bits, 16);
  if (parsed.ec != std::errc() || parsed.ptr != end) {
    throw BadText("'" + text + "' is not the bits of a number");
  }
  return bits;
}

std::string text_of(const ParsedJson& json) {
  if (json.contains("value")) return json.at("value").get<std::string>();
  const std::string hex = json.at("hex").get<std::string>();
  if (hex.size() % 2 != 0) throw BadText("half a byte in a string");
  std::string text;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    unsigned byte = 0;
    const auto parsed = std::from_chars(hex.data() + i, hex.data() + i + 2, byte, 16);
    if (parsed.ec != std::errc() || parsed.ptr != hex.data() + i + 2) {
      throw BadText("'" + hex + "' is not hexadecimal");
    }
    text.push_back(static_cast<char>(byte));
  }
  return text;
}

std::vector<Word> list_of(const ParsedJson& json, ArgumentKind kind) {
  std::vector<Word> words;
  for (const ParsedJson& value : json.at(kind == ArgumentKind::kFloatList ? "bits" : "values")) {
    if (kind == ArgumentKind::kFloatList) {
      words.push_back(bits_of(value));
    } else if (kind == ArgumentKind::kBoolList) {
      words.push_back(value.get<bool>() ? 1 : 0);
    } else {
      words.push_back(static_cast<Word>(value.get<std::int64_t>()));
    }
  }
  return words;
}

void read_tensor(const ParsedJson& json, DecodedArgument* argument) {
  const Device device = device_of(json.at("device").get<std::string>());
  argument->sizes = json.at("sizes").get<std::vector<std::int64_t>>();
  argument->strides = json.at("strides").get<std::vector<std::int64_t>>();
  if (argument->sizes.size() != argument->strides.size() || argument->sizes.size() > UINT8_MAX) {
    throw BadText("a tensor's sizes and strides do not belong together");
  }
  argument->tensor = {.dtype = dtype_number(json.at("dtype")),
                      .device_type = device.type,
                      .device_index = device.index,
                      .dim = static_cast<std::uint8_t>(argument->sizes.size()),
                      .wrapped_number = json.at("wrapped").get<bool>(),
                      .aligned = json.at("aligned").get<bool>()};
}

ArgumentKind kind_of(const std::string& name) {
  constexpr std::array kNames = {
      "none",        "undefined_tensor", "tensor",        "tensor_list", "int",        "float",
      "bool",        "complex",          "string",        "int_list",    "float_list", "bool_list",
      "scalar_type", "layout",           "memory_format", "device",      "scalar_list"};
  static_assert(kNames.size() == static_cast<std::size_t>(ArgumentKind::kScalarList));
  return static_cast<ArgumentKind>(number_of(kNames, name, "kind of argument") + 1);
}

DecodedArgument argument_of(const ParsedJson& json, int depth) {
  DecodedArgument argument;
  argument.kind = kind_of(json.at("kind").get<std::string>());
  switch (argument.kind) {
    case ArgumentKind::kNone:
    case ArgumentKind::kUndefinedTensor:
      break;
    case ArgumentKind::kTensor:
      read_tensor(json, &argument);
      break;
    case ArgumentKind::kTensorList:
    case ArgumentKind::kScalarList:
      if (depth > 0) throw BadText("a list in a list");
      for (const ParsedJson& element : json.at("elements")) {
        argument.elements.push_back(argument_of(element, depth + 1));
      }
      break;
    case ArgumentKind::kInt:
      argument.payload = {static_cast<Word>(json.at("value").get<std::int64_t>())};
      break;
    case ArgumentKind::kFloat:
      argument.payload = {bits_of(json.at("bits"))};
      break;
    case ArgumentKind::kBool:
      argument.payload = {json.at("value").get<bool>() ? Word{1} : Word{0}};
      break;
    case ArgumentKind::kComplex:
      argument.payload = {bits_of(json.at("real")), bits_of(json.at("imag"))};
      break;
    case ArgumentKind::kString:
      argument.text = text_of(json);
      break;
    case ArgumentKind::kIntList:
    case ArgumentKind::kFloatList:
    case ArgumentKind::kBoolList:
      argument.payload = list_of(json, argument.kind);
      break;
    case ArgumentKind::kScalarType:
      argument.payload = {named_word(json, kScalarTypeNames, "dtype")};
      break;
    case ArgumentKind::kLayout:
      argument.payload = {named_word(json, kLayoutNames, "layout")};
      break;
    case ArgumentKind::kMemoryFormat:
      argument.payload = {named_word(json, kMemoryFormatNames, "memory_format")};
      break;
    case ArgumentKind::kDevice: {
      const Device device = device_of(json.at("device").get<std::string>());
      argument.payload = {Word{device.type} << field_info(KeyField::kDeviceType).offset |
                          static_cast<Word>(device.index + 1)
                              << field_info(KeyField::kDeviceIndex).offset};
      break;
    }
  }
  return argument;
}

}  // namespace

bool parse_call(std::string_view text, KeyBuffer* buffer, std::string* problem) {
  try {
    const ParsedJson json = ParsedJson::parse(text);
    const ParsedJson& state = json.at("state");
    DecodedCall call;
    call.state = {.default_dtype = dtype_number(state.at("default_dtype")),
                  .deterministic = state.at("deterministic").get<bool>(),
                  .deterministic_warn_only = state.at("deterministic_warn_only").get<bool>(),
                  .fill_uninitialized_memory = state.at("fill_uninitialized_memory").get<bool>(),
                  .num_threads = state.at("num_threads").get<std::uint16_t>()};
    if (state.contains("autocast")) {
      call.state.autocast = true;
      call.state.autocast_dtype = dtype_number(state.at("autocast"));
    }
    for (const ParsedJson& argument : json.at("args")) {
      call.arguments.push_back(argument_of(argument, 0));
    }
    if (encode_call(call, buffer)) return true;
    *problem = "the call is too long, or a value is out of range";
  } catch (const ParsedJson::exception& error) {
    *problem = error.what();
  } catch (const BadText& error) {
    *problem = error.what();
  }
  return false;
}

}  // namespace eagercache
