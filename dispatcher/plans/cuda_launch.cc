#include "dispatcher/plans/cuda_launch.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "dispatcher/plans/plan_fields.h"

namespace eagercache {
namespace {

using nlohmann::json;
using Argument = CudaLaunch::Argument;

constexpr std::size_t kMaxKernelName = 512;
constexpr std::uint64_t kMaxGridX = 0x7FFFFFFF;
constexpr std::uint64_t kMaxGridYZ = 0xFFFF;
constexpr std::uint64_t kMaxThreads = 1024;
constexpr std::uint64_t kMaxShared = 1 << 20;

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

// A number below `limit`.
std::optional<std::uint64_t> read_index(const json& value, std::size_t limit) {
  return limit == 0 ? std::nullopt : read_number(value, limit - 1);
}

std::optional<Argument> read_value(const json& value) {
  const auto type = read_type(value[1]);
  if (!type || !value[2].is_number_integer()) {
    return std::nullopt;
  }
  const auto bits = static_cast<std::uint64_t>(value[2].get<std::int64_t>());
  return Argument{Argument::Kind::kValue, *type, 0, bits};
}

// A pointer, moved by a number of bytes or by one of the plan's numbers.
std::optional<Argument> read_pointer(const json& value, const CudaLaunchLimits& limits,
                                     Argument::Kind kind) {
  const auto index = read_index(value[1], limits.pointers);
  const auto offset = kind == Argument::Kind::kPart ? read_index(value[2], limits.numbers)
                                                    : read_number(value[2], kMaxPlanBytes);
  if (!index || !offset) {
    return std::nullopt;
  }
  return Argument{kind, Argument::Type::kInt64, static_cast<std::uint16_t>(*index), *offset};
}

// The number in an input, one of the plan's or one of the call's.
std::optional<Argument> read_passed(const json& value, std::size_t limit, Argument::Kind kind) {
  const auto index = read_index(value[1], limit);
  const auto type = read_type(value[2]);
  if (!index || !type) {
    return std::nullopt;
  }
  const bool integer = *type == Argument::Type::kInt32 || *type == Argument::Type::kInt64;
  if ((kind == Argument::Kind::kNumber && !integer) ||
      ((kind == Argument::Kind::kScalar || kind == Argument::Kind::kInverse) && integer)) {
    return std::nullopt;
  }
  return Argument{kind, *type, static_cast<std::uint16_t>(*index), 0};
}

std::optional<Argument> read_argument(const json& value, const CudaLaunchLimits& limits) {
  if (!value.is_array() || value.empty() || !value[0].is_string()) {
    return std::nullopt;
  }
  const auto& kind = value[0].get_ref<const std::string&>();
  if (kind == "null") {
    return value.size() == 1 ? std::optional(Argument()) : std::nullopt;
  }
  if (value.size() != 3) {
    return std::nullopt;
  }
  if (kind == "value") {
    return read_value(value);
  }
  if (kind == "pointer") {
    return read_pointer(value, limits, Argument::Kind::kPointer);
  }
  if (kind == "part") {
    return read_pointer(value, limits, Argument::Kind::kPart);
  }
  if (kind == "input") {
    return read_passed(value, limits.inputs, Argument::Kind::kInput);
  }
  if (kind == "number") {
    return read_passed(value, limits.numbers, Argument::Kind::kNumber);
  }
  if (kind == "scalar") {
    return read_passed(value, limits.scalars, Argument::Kind::kScalar);
  }
  if (kind == "inverse") {
    return read_passed(value, limits.scalars, Argument::Kind::kInverse);
  }
  return std::nullopt;
}

bool read_grid(const json& value, const CudaLaunchLimits& limits, CudaLaunch* launch) {
  const auto grid = read_numbers(value, 3);
  if (!grid || grid->size() != 3) {
    return false;
  }
  std::array<std::uint64_t, 3> blocks{};
  std::transform(grid->begin(), grid->end(), blocks.begin(),
                 [](std::int64_t number) { return static_cast<std::uint64_t>(number); });
  const bool sound = limits.numbers == 0 ? is_grid(blocks)
                                         : std::ranges::all_of(blocks, [&](std::uint64_t number) {
                                             return number < limits.numbers;
                                           });
  std::ranges::transform(blocks, launch->grid.begin(),
                         [](std::uint64_t number) { return static_cast<std::uint32_t>(number); });
  return sound;
}

std::optional<CudaLaunch> read_launch(const json& value, const CudaLaunchLimits& limits) {
  if (!has_fields(value, {"arguments", "function", "grid", "object", "shared", "threads"})) {
    return std::nullopt;
  }
  CudaLaunch launch;
  const auto object = read_number(value["object"], CudaLaunch::kMaxObjects - 1);
  const auto threads = read_number(value["threads"], kMaxThreads);
  const auto shared = read_number(value["shared"], kMaxShared);
  const json& name = value["function"];
  if (!object || !threads || *threads == 0 || !shared ||
      !read_grid(value["grid"], limits, &launch) || !name.is_string() ||
      name.get_ref<const std::string&>().empty() ||
      name.get_ref<const std::string&>().size() > kMaxKernelName) {
    return std::nullopt;
  }
  launch.object = *object;
  launch.function = name.get<std::string>();
  launch.threads = static_cast<std::uint32_t>(*threads);
  launch.shared = static_cast<std::uint32_t>(*shared);
  const json& arguments = value["arguments"];
  if (!arguments.is_array() || arguments.size() > CudaLaunch::kMaxArguments) {
    return std::nullopt;
  }
  for (const json& element : arguments) {
    const auto argument = read_argument(element, limits);
    if (!argument) {
      return std::nullopt;
    }
    launch.arguments.push_back(*argument);
  }
  return launch;
}

}  // namespace

bool is_grid(const std::array<std::uint64_t, 3>& blocks) noexcept {
  return blocks[0] != 0 && blocks[0] <= kMaxGridX && blocks[1] != 0 && blocks[1] <= kMaxGridYZ &&
         blocks[2] != 0 && blocks[2] <= kMaxGridYZ;
}

std::optional<std::vector<CudaLaunch>> read_cuda_launches(const json& value,
                                                          const CudaLaunchLimits& limits) {
  if (!value.is_array() || value.empty() || value.size() > CudaLaunch::kMaxLaunches) {
    return std::nullopt;
  }
  std::vector<CudaLaunch> launches;
  for (const json& element : value) {
    auto launch = read_launch(element, limits);
    if (!launch) {
      return std::nullopt;
    }
    launches.push_back(std::move(*launch));
  }
  return launches;
}

std::size_t count_objects(const std::vector<CudaLaunch>& launches) noexcept {
  std::size_t count = 0;
  for (const CudaLaunch& launch : launches) {
    count = std::max(count, launch.object + 1);
  }
  return count;
}

}  // namespace eagercache
