#include "dispatcher/plans/cuda_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "dispatcher/plans/plan_fields.h"

namespace eagercache {
namespace {

using nlohmann::json;
using Argument = CudaPlan::Argument;

constexpr std::int64_t kCudaPlanVersion = 1;
constexpr std::size_t kMaxKernelName = 512;
// Limits of every architecture (CUDA C++ Programming Guide, "Technical Specifications per Compute
// Capability").
constexpr std::uint64_t kMaxGridX = 0x7FFFFFFF;
constexpr std::uint64_t kMaxGridYZ = 0xFFFF;
constexpr std::uint64_t kMaxThreads = 1024;
constexpr std::uint64_t kMaxShared = 1 << 20;

constexpr std::string_view kCudaPlanName = "launch plan for CUDA";

Status malformed_cuda_plan(const char* what) { return malformed_plan(kCudaPlanName, what); }

std::optional<Argument::Type> read_type(const json& value) {
  using Type = Argument::Type;
  static constexpr std::array<std::pair<std::string_view, Type>, 4> kTypes{
      {{"int32", Type::kInt32},
       {"int64", Type::kInt64},
       {"float32", Type::kFloat32},
       {"float64", Type::kFloat64}}};
  if (!value.is_string()) {
    return std::nullopt;
  }
  const auto found = std::find_if(kTypes.begin(), kTypes.end(), [&](const auto& known) {
    return known.first == value.get_ref<const std::string&>();
  });
  return found == kTypes.end() ? std::nullopt : std::optional(found->second);
}

// ["pointer", number, offset], ["input", number, type], ["value", type, integer], ["null"]. A value
// is the bits of its type as a signed number.
std::optional<Argument> read_argument(const json& value, std::size_t num_inputs,
                                      std::size_t num_pointers) {
  if (!value.is_array() || value.empty() || !value[0].is_string()) {
    return std::nullopt;
  }
  const auto& kind = value[0].get_ref<const std::string&>();
  Argument argument;
  if (kind == "null") {
    return value.size() == 1 ? std::optional(argument) : std::nullopt;
  }
  if (value.size() != 3) {
    return std::nullopt;
  }
  if (kind == "value") {
    const auto type = read_type(value[1]);
    if (!type || !value[2].is_number_integer()) {
      return std::nullopt;
    }
    argument.kind = Argument::Kind::kValue;
    argument.type = *type;
    argument.value = static_cast<std::uint64_t>(value[2].get<std::int64_t>());
    return argument;
  }
  const auto limit = kind == "pointer" ? num_pointers : kind == "input" ? num_inputs : 0;
  const auto index = limit == 0 ? std::nullopt : read_number(value[1], limit - 1);
  if (!index) {
    return std::nullopt;
  }
  argument.index = static_cast<std::uint16_t>(*index);
  if (kind == "input") {
    const auto type = read_type(value[2]);
    argument.kind = Argument::Kind::kInput;
    argument.type = type.value_or(Argument::Type::kInt64);
    return type ? std::optional(argument) : std::nullopt;
  }
  const auto offset = read_number(value[2], kMaxPlanBytes);
  argument.kind = Argument::Kind::kPointer;
  argument.value = offset.value_or(0);
  return offset ? std::optional(argument) : std::nullopt;
}

std::optional<CudaPlan::Launch> read_launch(const json& value, std::size_t num_inputs,
                                            std::size_t num_pointers) {
  if (!has_fields(value, {"arguments", "function", "grid", "object", "shared", "threads"})) {
    return std::nullopt;
  }
  CudaPlan::Launch launch;
  const auto object = read_number(value["object"], CudaPlan::kMaxObjects - 1);
  const auto threads = read_number(value["threads"], kMaxThreads);
  const auto shared = read_number(value["shared"], kMaxShared);
  const auto grid = read_numbers(value["grid"], 3);
  const json& name = value["function"];
  if (!object || !threads || *threads == 0 || !shared || !grid || grid->size() != 3 ||
      !name.is_string() || name.get_ref<const std::string&>().empty() ||
      name.get_ref<const std::string&>().size() > kMaxKernelName) {
    return std::nullopt;
  }
  for (std::size_t i = 0; i < 3; ++i) {
    const auto blocks = static_cast<std::uint64_t>((*grid)[i]);
    if (blocks == 0 || blocks > (i == 0 ? kMaxGridX : kMaxGridYZ)) {
      return std::nullopt;
    }
    launch.grid[i] = static_cast<std::uint32_t>(blocks);
  }
  launch.object = *object;
  launch.function = name.get<std::string>();
  launch.threads = static_cast<std::uint32_t>(*threads);
  launch.shared = static_cast<std::uint32_t>(*shared);
  const json& arguments = value["arguments"];
  if (!arguments.is_array() || arguments.size() > CudaPlan::kMaxArguments) {
    return std::nullopt;
  }
  for (const json& element : arguments) {
    const auto argument = read_argument(element, num_inputs, num_pointers);
    if (!argument) {
      return std::nullopt;
    }
    launch.arguments.push_back(*argument);
  }
  return launch;
}

}  // namespace

Result<CudaPlan> parse_cuda_plan(std::string_view text) {
  const Result<json> read =
      read_plan(text, kCudaPlanName, kCudaPlanVersion,
                {"inputs", "launches", "outputs", "scratch", "version", "writes"});
  if (!read) {
    return read.status();
  }
  const json& all = read.value();
  CudaPlan plan;
  const auto inputs = read_number(all["inputs"], CudaPlan::kMaxInputs);
  auto scratch = read_scratch(all["scratch"], CudaPlan::kMaxScratch);
  if (!inputs || !scratch) {
    return malformed_cuda_plan("inputs or scratch");
  }
  plan.num_inputs = *inputs;
  plan.scratch = std::move(*scratch);
  const auto writes = read_indices(all["writes"], plan.num_inputs);
  if (!writes) {
    return malformed_cuda_plan("writes");
  }
  plan.writes = *writes;
  auto outputs =
      read_plan_outputs(all["outputs"], plan.writes.empty() ? 1 : 0, CudaPlan::kMaxOutputs);
  if (!outputs) {
    return malformed_cuda_plan("outputs");
  }
  plan.outputs = std::move(*outputs);
  const json& launches = all["launches"];
  if (!launches.is_array() || launches.empty() || launches.size() > CudaPlan::kMaxLaunches) {
    return malformed_cuda_plan("launches");
  }
  const std::size_t num_pointers = plan.num_inputs + plan.outputs.size() + plan.scratch.size();
  for (const json& element : launches) {
    auto launch = read_launch(element, plan.num_inputs, num_pointers);
    if (!launch) {
      return malformed_cuda_plan("a launch");
    }
    plan.num_objects = std::max(plan.num_objects, launch->object + 1);
    plan.launches.push_back(std::move(*launch));
  }
  return plan;
}

}  // namespace eagercache
