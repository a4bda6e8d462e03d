#include "dispatcher/plans/cuda_shape_plan.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/kernels/kernel_forms.h"
#include "dispatcher/plans/cuda_plan.h"
#include "tests/dispatcher/plans/matrix_pattern.h"

namespace eagercache {
namespace {

using nlohmann::json;

std::optional<std::int64_t> evaluate(const json& steps, std::vector<std::int64_t> sizes = {}) {
  const auto expression = SizeExpression::read(steps, sizes.size());
  EXPECT_TRUE(expression) << steps;
  return expression ? expression->evaluate(sizes) : std::nullopt;
}

TEST(SizeExpression, ComputesAsPythonDoes) {
  EXPECT_EQ(evaluate({7}), 7);
  EXPECT_EQ(evaluate({"s1"}, {3, 5}), 5);
  EXPECT_EQ(evaluate({"s0", 2, "*", 1, "+"}, {3}), 7);
  EXPECT_EQ(evaluate({2, "s0", "-"}, {3}), -1);
  EXPECT_EQ(evaluate({0, 100, -32, "//", "-"}), 4);  // Inductor's rounding up
  EXPECT_EQ(evaluate({-7, 2, "//"}), -4);
  EXPECT_EQ(evaluate({-7, 2, "%"}), 1);
  EXPECT_EQ(evaluate({7, -2, "%"}), -1);
  EXPECT_EQ(evaluate({7, 2, "%"}), 1);
  EXPECT_EQ(evaluate({7, 9, "max"}), 9);
  EXPECT_EQ(evaluate({7, 9, "min"}), 7);
  EXPECT_EQ(evaluate({7, 9, "=="}), 0);
  EXPECT_EQ(evaluate({7, 9, "!="}), 1);
  EXPECT_EQ(evaluate({7, 7, "<"}), 0);
  EXPECT_EQ(evaluate({7, 7, "<="}), 1);
  EXPECT_EQ(evaluate({7, 0, "and"}), 0);
  EXPECT_EQ(evaluate({7, 0, "or"}), 1);
}

TEST(SizeExpression, HasNoValueBeyond64Bits) {
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(evaluate({"s0", 1, "+"}, {most}), std::nullopt);
  EXPECT_EQ(evaluate({"s0", 2, "*"}, {most}), std::nullopt);
  EXPECT_EQ(evaluate({0, "s0", "-", 2, "-"}, {most}), std::nullopt);
  EXPECT_EQ(evaluate({0, "s0", "-", 1, "-", -1, "//"}, {most}), std::nullopt);
  EXPECT_EQ(evaluate({1, 0, "//"}), std::nullopt);
  EXPECT_EQ(evaluate({1, 0, "%"}), std::nullopt);
}

TEST(SizeExpression, IsRefusedWhereItIsNotOneValue) {
  const auto refused = [](const json& steps) { return !SizeExpression::read(steps, 2); };
  EXPECT_FALSE(refused({"s0", "s1", "+"}));
  EXPECT_TRUE(refused(json::array()));
  EXPECT_TRUE(refused(json::object()));
  EXPECT_TRUE(refused({"+"}));
  EXPECT_TRUE(refused({1, "+"}));
  EXPECT_TRUE(refused({1, 2}));
  EXPECT_TRUE(refused({"s2"}));
  EXPECT_TRUE(refused({"s-1"}));
  EXPECT_TRUE(refused({"s"}));
  EXPECT_TRUE(refused({"s0x"}));
  EXPECT_TRUE(refused({"system"}));
  EXPECT_TRUE(refused({1.5}));
  EXPECT_TRUE(refused({true}));
  EXPECT_TRUE(refused({std::numeric_limits<std::uint64_t>::max()}));
  json deep = json::array();
  for (std::size_t i = 0; i < SizeExpression::kMaxDepth; ++i) {
    deep.push_back(1);
  }
  json deeper = deep;
  deeper.push_back(1);
  for (std::size_t i = 1; i < SizeExpression::kMaxDepth; ++i) {
    deep.push_back("+");
    deeper.push_back("+");
  }
  deeper.push_back("+");
  EXPECT_FALSE(refused(deep));
  EXPECT_TRUE(refused(deeper));
  json longer = {1};
  for (std::size_t i = 0; i < SizeExpression::kMaxSteps; i += 2) {
    longer.push_back(1);
    longer.push_back("+");
  }
  EXPECT_TRUE(refused(longer));
}

// abs of a float32 matrix of 8x12, both sizes open, with a scratch buffer as long as a row.
json open_plan() {
  json whole = json::parse(R"({
    "version": 1, "inputs": 1, "scratch": [5], "elements": 3, "choice": [[96, true]],
    "guards": [["s0", 1000, "<="]],
    "numbers": [["s0"], ["s1"], [1], ["s0", "s1", "*"], [0, "s0", "s1", "*", -64, "//", "-"],
                ["s1", 4, "*"], ["s1", 2, "*"]],
    "outputs": [{"dtype": "float32", "sizes": [0, 1], "strides": [1, 2]}],
    "launches": [{
      "object": 0, "function": "triton_poi_fused_abs_0", "grid": [4, 2, 2], "threads": 128,
      "shared": 0,
      "arguments": [["pointer", 0, 0], ["pointer", 1, 0], ["part", 2, 6], ["number", 3, "int32"],
                    ["value", "int32", -5], ["null"]]}]})");
  whole["pattern"] = pattern_json(matrix_pattern());
  return whole;
}

StatusCode code_of_open(const json& value) { return parse_cuda_shape_plan(value.dump()).code(); }

TEST(CudaShapePlan, ComputesWhatACallNeeds) {
  const Result<CudaShapePlan> parsed = parse_cuda_shape_plan(open_plan().dump());
  ASSERT_TRUE(parsed) << parsed.status().to_string();
  EXPECT_EQ(parsed->num_objects, 1U);
  EXPECT_EQ(parsed->launches[0].arguments[2].kind, CudaLaunch::Argument::Kind::kPart);
  std::array<std::int64_t, CudaShapePlan::kMaxNumbers> values{};
  ASSERT_TRUE(parsed->compute(std::vector<std::int64_t>{10, 13}, values));
  EXPECT_EQ(values[3], 130);
  EXPECT_EQ(values[4], 3);  // blocks of 64
  EXPECT_EQ(values[5], 52);
}

TEST(CudaShapePlan, AdmitsNoSizesForWhichItDoesNotHold) {
  const auto admits = [](const json& text, std::vector<std::int64_t> sizes) {
    const Result<CudaShapePlan> parsed = parse_cuda_shape_plan(text.dump());
    EXPECT_TRUE(parsed) << text;
    std::array<std::int64_t, CudaShapePlan::kMaxNumbers> values{};
    return parsed && parsed->compute(sizes, values);
  };
  EXPECT_TRUE(admits(open_plan(), {1000, 2}));
  EXPECT_FALSE(admits(open_plan(), {1001, 2}));  // a guard
  EXPECT_FALSE(admits(open_plan(), {0, 2}));     // nothing to launch
  EXPECT_FALSE(admits(open_plan(), {-1, -2}));
  EXPECT_FALSE(admits(open_plan(), {1000, 4'000'000}));  // more elements than 31 bits count
  json wrong = open_plan();
  wrong["numbers"][4] = {65536};
  wrong["launches"][0]["grid"] = {2, 4, 2};
  EXPECT_FALSE(admits(wrong, {8, 12}));  // more blocks than there may be
  wrong = open_plan();
  wrong["numbers"][5] = {0};
  EXPECT_FALSE(admits(wrong, {8, 12}));  // a buffer of nothing
  wrong = open_plan();
  wrong["numbers"][6] = {0, "s1", "-"};
  EXPECT_FALSE(admits(wrong, {8, 12}));  // in front of a buffer
  wrong = open_plan();
  wrong["numbers"][3] = {"s0", 1 << 30, "*"};
  wrong["elements"] = 0;
  EXPECT_FALSE(admits(wrong, {8, 12}));  // a number that its argument does not hold
  wrong = open_plan();
  wrong["numbers"][1] = {0, "s1", "-"};
  EXPECT_FALSE(admits(wrong, {8, 12}));  // an output's size
}

TEST(CudaShapePlan, IsRefusedWhereAFieldIsNotWhatItMustBe) {
  const auto refused = [](auto change) {
    json changed = open_plan();
    change(changed);
    return code_of_open(changed) == StatusCode::kCorrupt;
  };
  EXPECT_FALSE(refused([](json&) {}));
  EXPECT_TRUE(refused([](json& p) { p["inputs"] = 0; }));  // a symbol is a size of input 0
  EXPECT_TRUE(refused([](json& p) { p["numbers"] = json::array(); }));
  EXPECT_TRUE(refused([](json& p) { p["numbers"][0] = {"s2"}; }));
  EXPECT_TRUE(refused([](json& p) { p["guards"] = {{"+"}}; }));
  EXPECT_TRUE(refused([](json& p) { p["scratch"] = {7}; }));
  EXPECT_TRUE(refused([](json& p) { p["elements"] = 7; }));
  EXPECT_TRUE(refused([](json& p) { p["elements"] = -1; }));
  EXPECT_TRUE(refused([](json& p) { p["outputs"] = json::array(); }));
  EXPECT_TRUE(refused([](json& p) { p["outputs"][0]["sizes"] = {0}; }));
  EXPECT_TRUE(refused([](json& p) { p["outputs"][0]["strides"] = {1, 9}; }));
  EXPECT_TRUE(refused([](json& p) { p["outputs"][0]["dtype"] = "quantized"; }));
  EXPECT_TRUE(refused([](json& p) { p["launches"] = json::array(); }));
  EXPECT_TRUE(refused([](json& p) { p["launches"][0]["grid"] = {4, 2, 7}; }));
  EXPECT_TRUE(refused([](json& p) { p["launches"][0]["arguments"][2] = {"part", 3, 6}; }));
  EXPECT_TRUE(refused([](json& p) { p["launches"][0]["arguments"][2] = {"part", 2, 7}; }));
  EXPECT_TRUE(refused([](json& p) { p["launches"][0]["arguments"][3] = {"number", 7, "int32"}; }));
  EXPECT_TRUE(refused([](json& p) {
    p["launches"][0]["arguments"][3] = {"number", 3, "float32"};
  }));
  EXPECT_TRUE(refused([](json& p) { p["choice"] = json::array(); }));
  EXPECT_TRUE(refused([](json& p) { p["pattern"]["words"][2] = 1; }));
  EXPECT_TRUE(refused([](json& p) { p["more"] = 1; }));
  EXPECT_TRUE(refused([](json& p) { p.erase("guards"); }));
  json other = open_plan();
  other["version"] = 2;
  EXPECT_EQ(code_of_open(other), StatusCode::kIncompatible);
}

TEST(CudaShapePlan, ArgumentsOfOpenSizesAreForItsLaunchesAlone) {
  // A plan of fixed sizes has no numbers that they could name.
  for (const json& argument : {json{"number", 0, "int32"}, json{"part", 0, 0}}) {
    json fixed = json::parse(R"({
      "version": 1, "inputs": 1, "scratch": [], "writes": [],
      "outputs": [{"dtype": "float32", "sizes": [2], "strides": [1]}],
      "launches": [{"object": 0, "function": "f", "grid": [1, 1, 1], "threads": 32, "shared": 0,
                    "arguments": []}]})");
    fixed["launches"][0]["arguments"].push_back(argument);
    EXPECT_EQ(parse_cuda_plan(fixed.dump()).code(), StatusCode::kCorrupt) << argument;
  }
}

TEST(CudaShapePlan, LoadsNoKernelWithoutADriver) {
  if (CudaDriver::get() != nullptr) {
    GTEST_SKIP() << "there is a driver";
  }
  const std::vector<std::string> cubins{"none"};
  const auto made =
      make_cuda_kernel(cubins, {c10::DeviceType::CUDA, 0}, {"cuda_shapes", open_plan().dump(), {}});
  EXPECT_EQ(made.code(), StatusCode::kIncompatible);
}

}  // namespace
}  // namespace eagercache
