#include "dispatcher/plans/launch_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "dispatcher/plans/plan_fields.h"
#include "guards/key/scalar_class.h"

namespace eagercache {
namespace {

using nlohmann::json;

constexpr std::int64_t kVersion = 2;
constexpr std::int64_t kScalarVersion = 1;
constexpr std::size_t kMaxEntryLength = 128;
constexpr std::string_view kEntryPrefix = "eagercache_kernel_";

constexpr std::string_view kPlanName = "launch plan";

Status malformed(const char* what) { return malformed_plan(kPlanName, what); }

bool is_entry_name(const std::string& name) {
  return name.starts_with(kEntryPrefix) && name.size() > kEntryPrefix.size() &&
         name.size() <= kMaxEntryLength &&
         std::all_of(name.begin() + kEntryPrefix.size(), name.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

}  // namespace

Result<LaunchPlan> parse_launch_plan(std::string_view text) {
  const Result<json> read = read_plan(
      text, kPlanName, kVersion, {"entry", "inputs", "outputs", "scratch", "version", "writes"});
  if (!read) {
    return read.status();
  }
  const json& all = read.value();
  LaunchPlan plan;
  const auto inputs = read_number(all["inputs"], LaunchPlan::kMaxInputs);
  if (!inputs || !all["entry"].is_string() || !is_entry_name(all["entry"].get<std::string>())) {
    return malformed("inputs or entry");
  }
  plan.num_inputs = *inputs;
  plan.entry = all["entry"].get<std::string>();
  auto writes = read_indices(all["writes"], plan.num_inputs);
  if (!writes) {
    return malformed("writes");
  }
  plan.writes = std::move(*writes);
  auto outputs =
      read_plan_outputs(all["outputs"], plan.writes.empty() ? 1 : 0, LaunchPlan::kMaxOutputs);
  if (!outputs) {
    return malformed("outputs");
  }
  plan.outputs = std::move(*outputs);
  auto scratch = read_scratch(all["scratch"], LaunchPlan::kMaxScratch);
  if (!scratch) {
    return malformed("scratch");
  }
  plan.scratch = std::move(*scratch);
  return plan;
}

Result<ScalarPlan> parse_scalar_plan(std::string_view text) {
  constexpr std::string_view kName = "scalar plan";
  const Result<json> read = read_plan(text, kName, kScalarVersion, {"plan", "scalars", "version"});
  if (!read) {
    return read.status();
  }
  const auto scalars = read_number(read.value()["scalars"], kMaxScalars);
  if (!scalars || *scalars == 0) {
    return malformed_plan(kName, "scalars");
  }
  Result<LaunchPlan> plan = parse_launch_plan(read.value()["plan"].dump());
  if (!plan) {
    return plan.status();
  }
  return ScalarPlan{std::move(plan).value(), *scalars};
}

}  // namespace eagercache
