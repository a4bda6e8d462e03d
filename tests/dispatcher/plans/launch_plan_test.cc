#include "dispatcher/plans/launch_plan.h"

#include <gtest/gtest.h>

#include <string>

namespace eagercache {
namespace {

constexpr std::string_view kOutput = R"({"dtype":"float32","sizes":[2,3],"strides":[3,1]})";

std::string plan_text(std::string_view output = kOutput, std::string_view scratch = "64",
                      std::string_view entry = "eagercache_kernel_0af",
                      std::string_view inputs = "2", std::string_view version = "2",
                      std::string_view writes = "") {
  std::string text = R"({"entry":")";
  text.append(entry).append(R"(","inputs":)").append(inputs).append(R"(,"outputs":[)");
  text.append(output).append(R"(],"scratch":[)").append(scratch).append(R"(],"version":)");
  return text.append(version).append(R"(,"writes":[)").append(writes).append("]}");
}

StatusCode code_of(const std::string& text) { return parse_launch_plan(text).code(); }

TEST(LaunchPlan, SaysWhatItsTextSays) {
  const Result<LaunchPlan> plan = parse_launch_plan(plan_text());
  ASSERT_TRUE(plan) << plan.status().to_string();
  EXPECT_EQ(plan.value().entry, "eagercache_kernel_0af");
  EXPECT_EQ(plan.value().num_inputs, 2U);
  ASSERT_EQ(plan.value().outputs.size(), 1U);
  EXPECT_EQ(plan.value().outputs[0].dtype, c10::ScalarType::Float);
  EXPECT_EQ(plan.value().outputs[0].sizes, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(plan.value().outputs[0].strides, (std::vector<std::int64_t>{3, 1}));
  EXPECT_EQ(plan.value().scratch, std::vector<std::uint64_t>{64});
}

TEST(LaunchPlan, MayHaveNoInputsAndNoScratch) {
  const Result<LaunchPlan> plan =
      parse_launch_plan(plan_text(kOutput, "", "eagercache_kernel_0", "0"));
  ASSERT_TRUE(plan) << plan.status().to_string();
  EXPECT_EQ(plan.value().num_inputs, 0U);
  EXPECT_TRUE(plan.value().scratch.empty());
}

TEST(LaunchPlan, OfAnotherVersionIsIncompatible) {
  for (const std::string_view version : {"1", "3"}) {
    EXPECT_EQ(code_of(plan_text(kOutput, "64", "eagercache_kernel_0", "2", version)),
              StatusCode::kIncompatible);
  }
}

TEST(LaunchPlan, CutAnywhereIsCorrupt) {
  const std::string whole = plan_text();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_EQ(code_of(whole.substr(0, length)), StatusCode::kCorrupt) << length;
  }
}

TEST(LaunchPlan, NotCanonicalIsCorrupt) {
  EXPECT_EQ(code_of(" " + plan_text()), StatusCode::kCorrupt);
  EXPECT_EQ(code_of(R"({"inputs":1,)" + plan_text().substr(1)), StatusCode::kCorrupt);
  EXPECT_EQ(code_of(R"({"a":1,)" + plan_text().substr(1)), StatusCode::kCorrupt);
}

TEST(LaunchPlan, WithANumberOutOfRangeIsCorrupt) {
  for (const std::string_view output : {
           R"({"dtype":"float33","sizes":[2,3],"strides":[3,1]})",
           R"({"dtype":"float32","sizes":[2,-3],"strides":[3,1]})",
           R"({"dtype":"float32","sizes":[2,0],"strides":[3,1]})",
           R"({"dtype":"float32","sizes":[2,3],"strides":[1]})",
           R"({"dtype":"float32","sizes":[2,1.5],"strides":[3,1]})",
           R"({"dtype":"float32","sizes":[1000000000,1000000000],"strides":[1000000000,1]})",
           R"({"dtype":"float32","sizes":[2,3]})",
           R"([])",
       }) {
    EXPECT_EQ(code_of(plan_text(output)), StatusCode::kCorrupt) << output;
  }
  EXPECT_EQ(code_of(plan_text("")), StatusCode::kCorrupt) << "no output";
  for (const std::string_view scratch : {"0", "-1", "1e3", "9999999999999"}) {
    EXPECT_EQ(code_of(plan_text(kOutput, scratch)), StatusCode::kCorrupt) << scratch;
  }
  EXPECT_EQ(code_of(plan_text(kOutput, "64", "eagercache_kernel_0", "1025")), StatusCode::kCorrupt);
}

TEST(LaunchPlan, NamesTheInputsThatAreWritten) {
  const auto with = [](std::string_view writes, std::string_view output = "") {
    return parse_launch_plan(plan_text(output, "", "eagercache_kernel_0", "3", "2", writes));
  };
  const Result<LaunchPlan> plan = with("0,2");
  ASSERT_TRUE(plan) << plan.status().to_string();
  EXPECT_EQ(plan.value().writes, (std::vector<std::size_t>{0, 2}));
  EXPECT_TRUE(plan.value().outputs.empty());
  EXPECT_TRUE(with("1", kOutput));
  for (const std::string_view writes : {"3", "2,0", "1,1", "-1", "0,1,2,3"}) {
    EXPECT_EQ(with(writes).code(), StatusCode::kCorrupt) << writes;
  }
}

TEST(LaunchPlan, NamesOnlyEntriesOfOurOwn) {
  for (const std::string_view entry : {"system", "eagercache_kernel_", "eagercache_kernel_G", ""}) {
    EXPECT_EQ(code_of(plan_text(kOutput, "64", entry)), StatusCode::kCorrupt) << entry;
  }
}

}  // namespace
}  // namespace eagercache
