#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "guards/key/call_key.h"
#include "tests/guards/calls.h"

namespace eagercache {
namespace {

using Json = nlohmann::json;

std::vector<Word> key_of(const DecodedCall& call) {
  KeyBuffer buffer;
  EXPECT_TRUE(encode_call(call, &buffer));
  return {buffer.words().begin(), buffer.words().end()};
}

std::vector<Word> key_of(std::vector<DecodedArgument> arguments) {
  return key_of(DecodedCall{.state = {}, .arguments = std::move(arguments)});
}

Json described(const DecodedArgument& argument) {
  return Json::parse(describe_call(key_of({argument}))).at("args").at(0);
}

TEST(DescribeCall, GivesATensorAsDocumented) {
  EXPECT_EQ(described(testing::make_tensor({.dtype = 6}, {8, 4}, {4, 1})),
            Json::parse(R"({"kind": "tensor", "dtype": "float32", "device": "cpu", "sizes": [8, 4],
                            "strides": [4, 1], "wrapped": false, "aligned": true})"));
  const TensorTraits traits{
      .dtype = 15, .device_type = 1, .device_index = 2, .wrapped_number = true, .aligned = false};
  const Json other = described(testing::make_tensor(traits, {}, {}));
  EXPECT_EQ(other, Json::parse(R"({"kind": "tensor", "dtype": "bfloat16", "device": "cuda:2",
                                   "sizes": [], "strides": [], "wrapped": true,
                                   "aligned": false})"));
}

TEST(ParseCall, RefusesWhatIsNoDescriptionAndSaysWhy) {
  const std::string state = R"("state": {"default_dtype": "float32", "deterministic": false,
      "deterministic_warn_only": false, "fill_uninitialized_memory": false, "num_threads": 1})";
  const auto problem_of = [&](const std::string& args) {
    KeyBuffer buffer;
    std::string problem;
    EXPECT_FALSE(parse_call("{" + state + ", \"args\": " + args + "}", &buffer, &problem)) << args;
    return problem;
  };
  EXPECT_NE(problem_of("[").find("parse error"), std::string::npos);
  EXPECT_NE(problem_of(R"([{"kind": "tensors"}])").find("'tensors'"), std::string::npos);
  EXPECT_NE(problem_of(R"([{"kind": "int"}])").find("value"), std::string::npos);
  EXPECT_NE(problem_of(R"([{"kind": "scalar_type", "dtype": "float33"}])").find("'float33'"),
            std::string::npos);
  EXPECT_NE(problem_of(R"([{"kind": "device", "device": "cuda:"}])").find("'cuda:'"),
            std::string::npos);
  EXPECT_NE(problem_of(R"([{"kind": "float", "bits": "3ff"}])").find("'3ff'"), std::string::npos);
  EXPECT_NE(problem_of(R"([{"kind": "tensor", "dtype": "float32", "device": "cpu", "sizes": [1],
                            "strides": [], "wrapped": false, "aligned": true}])")
                .find("strides"),
            std::string::npos);
  // A list in a list, and a list of tensors that holds a number: neither is any call's.
  problem_of(R"([{"kind": "tensor_list", "elements": [{"kind": "tensor_list", "elements": []}]}])");
  problem_of(R"([{"kind": "tensor_list", "elements": [{"kind": "int", "value": 1}]}])");
  KeyBuffer buffer;
  std::string problem;
  EXPECT_FALSE(parse_call(R"({"args": []})", &buffer, &problem));
  EXPECT_NE(problem.find("state"), std::string::npos);
  EXPECT_TRUE(parse_call("{" + state + R"(, "args": []})", &buffer, &problem));
}

TEST(DescribeCall, GivesTheState) {
  const GlobalState state{.default_dtype = 7,
                          .deterministic = true,
                          .deterministic_warn_only = true,
                          .fill_uninitialized_memory = true,
                          .num_threads = 65535};
  EXPECT_EQ(Json::parse(describe_call(key_of(DecodedCall{.state = state, .arguments = {}}))),
            Json::parse(R"({"state": {"default_dtype": "float64", "deterministic": true,
                              "deterministic_warn_only": true, "fill_uninitialized_memory": true,
                              "num_threads": 65535},
                            "args": []})"));
  const GlobalState autocast{.default_dtype = 6, .autocast = true, .autocast_dtype = 15};
  EXPECT_EQ(Json::parse(describe_call(key_of(DecodedCall{.state = autocast, .arguments = {}})))
                .at("state")
                .at("autocast"),
            "bfloat16");
}

TEST(DescribeCall, GivesScalarsExactly) {
  for (const std::int64_t value :
       {std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max(),
        (std::int64_t{1} << 53) + 1, std::int64_t{-1}}) {
    const Json json = described(testing::make_int(value));
    EXPECT_EQ(json.at("kind"), "int");
    EXPECT_EQ(json.at("value").get<std::int64_t>(), value);
  }
  EXPECT_EQ(described(testing::make_float(1.0)),
            Json::parse(R"({"kind": "float", "bits": "0x3ff0000000000000", "value": "1.0"})"));
  EXPECT_EQ(described(testing::make_float(-0.0)),
            Json::parse(R"({"kind": "float", "bits": "0x8000000000000000", "value": "-0.0"})"));
  EXPECT_EQ(described(testing::make_float(std::nan(""))).at("value"), "nan");
  EXPECT_EQ(described(testing::make_float(-INFINITY)).at("value"), "-inf");
  EXPECT_EQ(described(testing::make_float(1e300)).at("value"), "1e+300");
  EXPECT_EQ(described(testing::make_bool(true)), Json::parse(R"({"kind": "bool", "value": true})"));
  EXPECT_EQ(described(testing::make_complex(1, -2)),
            Json::parse(R"({"kind": "complex", "value": ["1.0", "-2.0"],
                            "real": "0x3ff0000000000000", "imag": "0xc000000000000000"})"));
}

TEST(DescribeCall, GivesListsWithTheirHoles) {
  const DecodedArgument scalar = testing::make_tensor({.dtype = 4}, {}, {});
  const Json json = described(testing::make_list(
      ArgumentKind::kTensorList, {testing::make_none(), scalar, testing::make_undefined()}));
  EXPECT_EQ(json.at("kind"), "tensor_list");
  ASSERT_EQ(json.at("elements").size(), 3U);
  EXPECT_EQ(json.at("elements")[0], Json::parse(R"({"kind": "none"})"));
  EXPECT_EQ(json.at("elements")[1].at("dtype"), "int64");
  EXPECT_EQ(json.at("elements")[2], Json::parse(R"({"kind": "undefined_tensor"})"));
  EXPECT_EQ(described(testing::make_scalar(ArgumentKind::kIntList, {~Word{0}, 2})),
            Json::parse(R"({"kind": "int_list", "values": [-1, 2]})"));
  EXPECT_EQ(described(testing::make_scalar(ArgumentKind::kBoolList, {1, 0})),
            Json::parse(R"({"kind": "bool_list", "values": [true, false]})"));
  EXPECT_EQ(described(testing::make_scalar(ArgumentKind::kFloatList, {0x3ff8000000000000})),
            Json::parse(R"({"kind": "float_list", "values": ["1.5"],
                            "bits": ["0x3ff8000000000000"]})"));
  EXPECT_EQ(described(testing::make_list(ArgumentKind::kScalarList, {testing::make_int(1)})),
            Json::parse(R"({"kind": "scalar_list", "elements": [{"kind": "int", "value": 1}]})"));
}

TEST(DescribeCall, GivesEnumerationsAsNumberAndName) {
  EXPECT_EQ(described(testing::make_scalar(ArgumentKind::kScalarType, {11})),
            Json::parse(R"({"kind": "scalar_type", "value": 11, "dtype": "bool"})"));
  EXPECT_EQ(described(testing::make_scalar(ArgumentKind::kLayout, {1})),
            Json::parse(R"({"kind": "layout", "value": 1, "layout": "sparse_coo"})"));
  EXPECT_EQ(described(testing::make_scalar(ArgumentKind::kMemoryFormat, {2})),
            Json::parse(R"({"kind": "memory_format", "value": 2,
                            "memory_format": "channels_last"})"));
  EXPECT_EQ(described(testing::make_device(1, 0)),
            Json::parse(R"({"kind": "device", "type": 1, "index": 0, "device": "cuda:0"})"));
  EXPECT_EQ(described(testing::make_scalar(ArgumentKind::kLayout, {99})).at("layout"),
            "layout<99>");
}

TEST(DescribeCall, KeepsStringsThatAreNotUtf8) {
  EXPECT_EQ(described(testing::make_string("tr\"unc")).at("value"), "tr\"unc");
  EXPECT_EQ(described(testing::make_string("\xff\x01")).at("hex"), "ff01");
}

TEST(DescribeCall, NamesTheArgumentsItHasNamesFor) {
  const std::vector<std::string> names = {"self"};
  const auto key = key_of({testing::make_none(), testing::make_int(1)});
  const Json json = Json::parse(describe_call(key, names));
  EXPECT_EQ(json.at("args")[0].at("name"), "self");
  EXPECT_FALSE(json.at("args")[1].contains("name"));
}

TEST(FirstDifference, NamesTheArgumentAndTheField) {
  const std::vector<std::string> names = {"self", "other"};
  const auto matrix = [](std::vector<std::int64_t> sizes) {
    return testing::make_tensor({.dtype = 6}, std::move(sizes), {8, 1});
  };
  EXPECT_EQ(first_difference(key_of({matrix({8, 4})}), key_of({matrix({8, 8})})),
            "argument 0: sizes [8, 4] is not [8, 8]");
  EXPECT_EQ(first_difference(key_of({matrix({8, 4}), testing::make_int(1)}),
                             key_of({matrix({8, 4}), testing::make_float(1)}), names),
            "argument 1 (other): int is not float");
  EXPECT_EQ(
      first_difference(key_of({testing::make_float(0.0)}), key_of({testing::make_float(-0.0)})),
      "argument 0: value 0.0 is not -0.0");
  EXPECT_EQ(first_difference(
                key_of({testing::make_list(ArgumentKind::kTensorList, {matrix({1, 1})})}),
                key_of({testing::make_list(ArgumentKind::kTensorList, {testing::make_none()})})),
            "argument 0: element 0: tensor is not none");
  EXPECT_EQ(first_difference(key_of(DecodedCall{}), key_of({testing::make_none()})),
            "0 arguments is not 1");
  DecodedCall threads;
  threads.state.num_threads = 2;
  EXPECT_EQ(first_difference(key_of(DecodedCall{}), key_of(threads)),
            "state: num_threads 1 is not 2");
}

TEST(FirstDifference, IsEmptyOnlyForEqualKeys) {
  const auto key = key_of({testing::make_int(1)});
  EXPECT_EQ(first_difference(key, key), "");
  EXPECT_NE(first_difference(key, std::vector<Word>{1, 2, 3}), "");
}

TEST(ScalarTypeName, FollowsTorchsNumbering) {
  EXPECT_EQ(scalar_type_name(0), "uint8");
  EXPECT_EQ(scalar_type_name(4), "int64");
  EXPECT_EQ(scalar_type_name(6), "float32");
  EXPECT_EQ(scalar_type_name(10), "complex128");
  EXPECT_EQ(scalar_type_name(11), "bool");
  EXPECT_EQ(scalar_type_name(15), "bfloat16");
  EXPECT_EQ(scalar_type_name(22), "bits16");
  EXPECT_EQ(scalar_type_name(24), "float8_e4m3fn");
  EXPECT_EQ(scalar_type_name(27), "uint16");
  EXPECT_EQ(scalar_type_name(30), "uint1");
  EXPECT_EQ(scalar_type_name(43), "int7");
  EXPECT_EQ(scalar_type_name(46), "bcomplex32");
  EXPECT_EQ(scalar_type_name(200), "dtype<200>");
  std::set<std::string> names;
  for (int dtype = 0; dtype < 256; ++dtype) {
    EXPECT_TRUE(names.insert(scalar_type_name(static_cast<std::uint8_t>(dtype))).second) << dtype;
  }
}

}  // namespace
}  // namespace eagercache
