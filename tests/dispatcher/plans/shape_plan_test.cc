#include "dispatcher/plans/shape_plan.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/dispatcher/plans/matrix_pattern.h"

namespace eagercache {
namespace {

using nlohmann::json;

// abs of a float32 matrix of 8x12 on two threads, both sizes symbolic.
json example() {
  return {{"choice", {{96, true}, {4096, false}}},
          {"entry", "eagercache_kernel_0a"},
          {"inputs", 1},
          {"outputs", {{{"dtype", "float32"}, {"rank", 2}}}},
          {"pattern", pattern_json(matrix_pattern())},
          {"scratch", 1},
          {"shape", "eagercache_shape_0a"},
          {"version", 1}};
}

StatusCode shape_code_of(const json& plan) { return parse_shape_plan(plan.dump()).status().code(); }

TEST(ShapePlan, IsReadBack) {
  const Result<ShapePlan> plan = parse_shape_plan(example().dump());
  ASSERT_TRUE(plan) << plan.status().message();
  EXPECT_EQ(plan.value().entry, "eagercache_kernel_0a");
  EXPECT_EQ(plan.value().shape, "eagercache_shape_0a");
  EXPECT_EQ(plan.value().outputs[0].dtype, c10::ScalarType::Float);
  EXPECT_EQ(plan.value().count_numbers(), 6U);
  EXPECT_EQ(plan.value().pattern.symbols[1], (ShapePattern::Symbol{3, 0, 1}));
}

TEST(ShapePlan, ChoosesAsAtTheNearestMeasuredSize) {
  const Result<ShapePlan> plan = parse_shape_plan(example().dump());
  ASSERT_TRUE(plan);
  EXPECT_TRUE(plan.value().chooses_kernel(1));
  EXPECT_TRUE(plan.value().chooses_kernel(96));
  EXPECT_TRUE(plan.value().chooses_kernel(500));
  EXPECT_FALSE(plan.value().chooses_kernel(800));
  EXPECT_FALSE(plan.value().chooses_kernel(1 << 20));
}

TEST(ShapePlan, IsRefusedWhereAFieldIsNotWhatItMustBe) {
  const auto refused = [](auto change) {
    json plan = example();
    change(plan);
    return shape_code_of(plan) == StatusCode::kCorrupt;
  };
  EXPECT_FALSE(refused([](json&) {}));
  EXPECT_TRUE(refused([](json& p) { p["entry"] = "system"; }));
  EXPECT_TRUE(refused([](json& p) { p["shape"] = "eagercache_kernel_0a"; }));
  EXPECT_TRUE(refused([](json& p) { p["inputs"] = 0; }));  // a symbol is a size of input 0
  EXPECT_TRUE(refused([](json& p) { p["inputs"] = 1000; }));
  EXPECT_TRUE(refused([](json& p) { p["scratch"] = -1; }));
  EXPECT_TRUE(refused([](json& p) { p["outputs"] = json::array(); }));
  EXPECT_TRUE(refused([](json& p) { p["outputs"][0]["dtype"] = "complex32"; }));
  EXPECT_TRUE(refused([](json& p) { p["outputs"][0]["dtype"] = "quantized"; }));
  EXPECT_TRUE(refused([](json& p) { p["outputs"][0]["rank"] = 17; }));
  EXPECT_TRUE(refused([](json& p) { p["pattern"]["symbols"][0][0] = 4; }));
  EXPECT_TRUE(refused([](json& p) { p["pattern"]["symbols"] = json::array(); }));
  EXPECT_TRUE(refused([](json& p) { p["pattern"]["words"][2] = 1; }));
  EXPECT_TRUE(refused([](json& p) { p["pattern"]["more"] = 1; }));
  EXPECT_TRUE(refused([](json& p) { p["choice"] = json::array(); }));
  EXPECT_TRUE(refused([](json& p) { p["choice"] = {{96, true}, {96, false}}; }));
  EXPECT_TRUE(refused([](json& p) { p["choice"] = {{0, true}}; }));
  EXPECT_TRUE(refused([](json& p) { p["more"] = 1; }));
  EXPECT_TRUE(refused([](json& p) { p.erase("shape"); }));
}

TEST(ShapePlan, IsOfOneVersionAndOneSpelling) {
  json other = example();
  other["version"] = 2;
  EXPECT_EQ(shape_code_of(other), StatusCode::kIncompatible);
  EXPECT_EQ(parse_shape_plan(example().dump(1)).status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(parse_shape_plan("").status().code(), StatusCode::kCorrupt);
}

}  // namespace
}  // namespace eagercache
