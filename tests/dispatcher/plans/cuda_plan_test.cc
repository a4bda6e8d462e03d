#include "dispatcher/plans/cuda_plan.h"

#include <gtest/gtest.h>

#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/kernels/kernel_forms.h"

namespace eagercache {
namespace {

using nlohmann::json;

json plan() {
  return json::parse(R"({
    "version": 1, "inputs": 2, "scratch": [64], "writes": [],
    "outputs": [{"dtype": "float32", "sizes": [2, 3], "strides": [3, 1]}],
    "launches": [{
      "object": 0, "function": "triton_poi_fused_mul_0", "grid": [4, 1, 1], "threads": 128,
      "shared": 0,
      "arguments": [["pointer", 0, 0], ["input", 1, "float64"], ["pointer", 3, 16],
                    ["value", "int32", -5], ["null"]]}]})");
}

StatusCode cuda_code_of(const json& value) { return parse_cuda_plan(value.dump()).code(); }

TEST(CudaPlan, SaysWhatItsTextSays) {
  const Result<CudaPlan> parsed = parse_cuda_plan(plan().dump());
  ASSERT_TRUE(parsed) << parsed.status().to_string();
  EXPECT_EQ(parsed.value().num_inputs, 2U);
  EXPECT_EQ(parsed.value().num_objects, 1U);
  ASSERT_EQ(parsed.value().launches.size(), 1U);
  const CudaLaunch& launch = parsed.value().launches.front();
  EXPECT_EQ(launch.function, "triton_poi_fused_mul_0");
  EXPECT_EQ(launch.grid, (std::array<std::uint32_t, 3>{4, 1, 1}));
  EXPECT_EQ(launch.threads, 128U);
  using Kind = CudaLaunch::Argument::Kind;
  using Type = CudaLaunch::Argument::Type;
  ASSERT_EQ(launch.arguments.size(), 5U);
  EXPECT_EQ(launch.arguments[1].kind, Kind::kInput);
  EXPECT_EQ(launch.arguments[1].type, Type::kFloat64);
  EXPECT_EQ(launch.arguments[2].index, 3U);
  EXPECT_EQ(launch.arguments[2].value, 16U);
  EXPECT_EQ(static_cast<std::int64_t>(launch.arguments[3].value), -5);
  EXPECT_EQ(launch.arguments[4].kind, Kind::kNull);
}

json scalar_plan() {
  json own = plan();
  own["launches"][0]["arguments"] = json::parse(
      R"([["pointer", 0, 0], ["scalar", 1, "float32"], ["inverse", 0, "float64"], ["null"]])");
  return {{"plan", own}, {"scalars", 2}, {"version", 1}};
}

TEST(CudaScalarPlan, TakesNumbersOfTheCall) {
  const Result<CudaPlan> parsed = parse_cuda_scalar_plan(scalar_plan().dump());
  ASSERT_TRUE(parsed) << parsed.status().to_string();
  EXPECT_EQ(parsed.value().num_scalars, 2U);
  const auto& arguments = parsed.value().launches.front().arguments;
  using Kind = CudaLaunch::Argument::Kind;
  EXPECT_EQ(arguments[1].kind, Kind::kScalar);
  EXPECT_EQ(arguments[1].index, 1U);
  EXPECT_EQ(arguments[1].type, CudaLaunch::Argument::Type::kFloat32);
  EXPECT_EQ(arguments[2].kind, Kind::kInverse);
  EXPECT_EQ(arguments[2].type, CudaLaunch::Argument::Type::kFloat64);
}

TEST(CudaScalarPlan, WithAnythingElseIsCorrupt) {
  json without = scalar_plan();
  without["scalars"] = 0;
  EXPECT_EQ(parse_cuda_scalar_plan(without.dump()).code(), StatusCode::kCorrupt);
  json fewer = scalar_plan();
  fewer["scalars"] = 1;  // of which the second one is taken
  EXPECT_EQ(parse_cuda_scalar_plan(fewer.dump()).code(), StatusCode::kCorrupt);
  json integer = scalar_plan();
  integer["plan"]["launches"][0]["arguments"][1][2] = "int32";
  EXPECT_EQ(parse_cuda_scalar_plan(integer.dump()).code(), StatusCode::kCorrupt);
  json other = scalar_plan();
  other["version"] = 2;
  EXPECT_EQ(parse_cuda_scalar_plan(other.dump()).code(), StatusCode::kIncompatible);
  // A plan without numbers of the call takes none.
  EXPECT_EQ(cuda_code_of(scalar_plan()["plan"]), StatusCode::kCorrupt);
  EXPECT_EQ(parse_cuda_scalar_plan(plan().dump()).code(), StatusCode::kCorrupt);
}

TEST(CudaPlan, OfAnotherVersionIsIncompatible) {
  json other = plan();
  other["version"] = 2;
  EXPECT_EQ(cuda_code_of(other), StatusCode::kIncompatible);
}

TEST(CudaPlan, CutAnywhereIsCorrupt) {
  const std::string whole = plan().dump();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_EQ(parse_cuda_plan(whole.substr(0, length)).code(), StatusCode::kCorrupt) << length;
  }
}

TEST(CudaPlan, EveryFieldIsNeededAndNoneMore) {
  const json whole = plan();
  for (const auto& [name, value] : whole.items()) {
    json without = plan();
    without.erase(name);
    EXPECT_EQ(cuda_code_of(without), StatusCode::kCorrupt) << name;
  }
  for (const auto& [name, value] : whole["launches"][0].items()) {
    json without = plan();
    without["launches"][0].erase(name);
    EXPECT_EQ(cuda_code_of(without), StatusCode::kCorrupt) << name;
  }
  json more = plan();
  more["launches"][0]["stream"] = 0;
  EXPECT_EQ(cuda_code_of(more), StatusCode::kCorrupt);
}

TEST(CudaPlan, NumbersOutOfRangeAreCorrupt) {
  struct Change {
    const char* field;
    json value;
  };
  for (const Change& change : std::vector<Change>{
           {"threads", 0},
           {"threads", 2048},
           {"shared", 1 << 21},
           {"shared", -1},
           {"object", CudaLaunch::kMaxObjects},
           {"function", ""},
           {"grid", json::array({1, 1})},
           {"grid", json::array({0, 1, 1})},
           {"grid", json::array({1, 1 << 16, 1})},
           {"arguments", json::array({json::array({"pointer", 4, 0})})},
           {"arguments", json::array({json::array({"pointer", 0})})},
           {"arguments", json::array({json::array({"input", 2, "float32"})})},
           {"arguments", json::array({json::array({"input", 0, "float16"})})},
           {"arguments", json::array({json::array({"value", "int32", 0.5})})},
           {"arguments", json::array({json::array({"null", 0})})},
           {"arguments", json::array({json::array({"other", 0, 0})})},
       }) {
    json bad = plan();
    bad["launches"][0][change.field] = change.value;
    EXPECT_EQ(cuda_code_of(bad), StatusCode::kCorrupt)
        << change.field << " " << change.value.dump();
  }
}

TEST(CudaPlan, AStepOverHundredsOfTensorsIsOnePlan) {
  json many = plan();
  many["inputs"] = 400;
  many["outputs"] = std::vector<json>(200, many["outputs"][0]);
  many["launches"] = std::vector<json>(40, many["launches"][0]);
  many["launches"][39]["object"] = 39;
  many["launches"][0]["arguments"] = std::vector<json>(255, json::array({"pointer", 599, 0}));
  const Result<CudaPlan> parsed = parse_cuda_plan(many.dump());
  ASSERT_TRUE(parsed) << parsed.status().to_string();
  EXPECT_EQ(parsed.value().num_objects, 40U);
  EXPECT_EQ(parsed.value().launches.front().arguments.back().index, 599U);
  many["launches"] = std::vector<json>(CudaLaunch::kMaxLaunches + 1, many["launches"][1]);
  EXPECT_EQ(cuda_code_of(many), StatusCode::kCorrupt);
}

TEST(CudaPlan, WritesAreInputsInOrderAndMayStandForOutputs) {
  json writing = plan();
  writing["writes"] = {0, 1};
  writing["outputs"] = json::array();
  writing["launches"][0]["arguments"] = json::array();
  const Result<CudaPlan> parsed = parse_cuda_plan(writing.dump());
  ASSERT_TRUE(parsed) << parsed.status().to_string();
  EXPECT_EQ(parsed.value().writes, (std::vector<std::size_t>{0, 1}));
  for (const json& bad :
       {json::array({1, 0}), json::array({0, 0}), json::array({2}), json::array({-1}), json(0)}) {
    writing["writes"] = bad;
    EXPECT_EQ(cuda_code_of(writing), StatusCode::kCorrupt) << bad.dump();
  }
  writing["writes"] = json::array();
  EXPECT_EQ(cuda_code_of(writing), StatusCode::kCorrupt);
}

TEST(CudaKernel, NeedsADriver) {
  if (CudaDriver::get() != nullptr) {
    GTEST_SKIP() << "this machine has one";
  }
  const std::vector<std::string> objects{"no machine code"};
  EXPECT_EQ(make_cuda_kernel(objects, c10::Device("cuda:0"), {"cuda", plan().dump(), {}}).code(),
            StatusCode::kIncompatible);
}

TEST(CudaKernel, OfAnotherFormIsIncompatible) {
  EXPECT_EQ(make_cuda_kernel({}, c10::Device("cuda:0"), {"bare", plan().dump(), {}}).code(),
            StatusCode::kIncompatible);
  EXPECT_EQ(make_cuda_kernel({}, c10::Device("cuda:0"), {"cuda", "{}", {}}).code(),
            StatusCode::kCorrupt);
}

TEST(CudaDriver, KnowsWhichErrorsBreakTheContext) {
  for (const int error : {214, 700, 709, 710, 716, 719, 720}) {
    EXPECT_TRUE(is_sticky_cuda_error(error)) << error;
  }
  for (const int error : {1, 2, 200, 201, 209, 400, 701, 712, 713, 900, 901}) {
    EXPECT_FALSE(is_sticky_cuda_error(error)) << error;
  }
}

}  // namespace
}  // namespace eagercache
