#include "dispatcher/plans/cuda_shape_plan.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "dispatcher/plans/plan_fields.h"

namespace eagercache {
namespace {

using nlohmann::json;
using Index = CudaShapePlan::Index;

constexpr std::int64_t kCudaShapePlanVersion = 1;
constexpr std::string_view kCudaShapePlanName = "shape plan for CUDA";
// What the key builder lets through has its elements counted by 31 bits; what is computed from that
// must have, too.
constexpr std::int64_t kMaxElements = std::numeric_limits<std::int32_t>::max();
constexpr auto kMaxBytes = static_cast<std::int64_t>(kMaxPlanBytes);

Status malformed_cuda_shape_plan(const char* what) {
  return malformed_plan(kCudaShapePlanName, what);
}

std::optional<Index> index_in(const json& value, std::size_t count) {
  const auto index = count == 0 ? std::nullopt : read_number(value, count - 1);
  return index ? std::optional(static_cast<Index>(*index)) : std::nullopt;
}

std::optional<std::vector<Index>> indices_in(const json& value, std::size_t count,
                                             std::size_t most) {
  if (!value.is_array() || value.size() > most) {
    return std::nullopt;
  }
  std::vector<Index> indices;
  for (const json& element : value) {
    const auto index = index_in(element, count);
    if (!index) {
      return std::nullopt;
    }
    indices.push_back(*index);
  }
  return indices;
}

std::optional<std::vector<SizeExpression>> read_expressions(const json& value, std::size_t symbols,
                                                            std::size_t most) {
  if (!value.is_array() || value.size() > most) {
    return std::nullopt;
  }
  std::vector<SizeExpression> expressions;
  for (const json& element : value) {
    auto expression = SizeExpression::read(element, symbols);
    if (!expression) {
      return std::nullopt;
    }
    expressions.push_back(std::move(*expression));
  }
  return expressions;
}

// {"dtype": ..., "sizes": [...], "strides": [...]}, with the indices of numbers.
std::optional<CudaShapePlan::Output> read_sized_output(const json& value, std::size_t numbers) {
  if (!has_fields(value, {"dtype", "sizes", "strides"}) || !value["dtype"].is_string()) {
    return std::nullopt;
  }
  const auto dtype = dtype_by_name(value["dtype"].get_ref<const std::string&>());
  auto sizes = indices_in(value["sizes"], numbers, CudaShapePlan::kMaxRank);
  auto strides = indices_in(value["strides"], numbers, CudaShapePlan::kMaxRank);
  if (!dtype || !sizes || !strides || sizes->size() != strides->size()) {
    return std::nullopt;
  }
  return CudaShapePlan::Output{*dtype, std::move(*sizes), std::move(*strides)};
}

std::optional<std::vector<CudaShapePlan::Output>> read_sized_outputs(const json& value,
                                                                     std::size_t numbers) {
  if (!value.is_array() || value.empty() || value.size() > CudaShapePlan::kMaxOutputs) {
    return std::nullopt;
  }
  std::vector<CudaShapePlan::Output> outputs;
  for (const json& element : value) {
    auto output = read_sized_output(element, numbers);
    if (!output) {
      return std::nullopt;
    }
    outputs.push_back(std::move(*output));
  }
  return outputs;
}

// Whether a tensor of these sizes and strides holds something and is not larger than any may be.
bool is_tensor(const CudaShapePlan::Output& output, std::span<const std::int64_t> values) {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < output.sizes.size(); ++i) {
    const std::int64_t size = values[output.sizes[i]];
    const std::int64_t stride = values[output.strides[i]];
    std::int64_t reach = 0;
    if (size < 1 || size > kMaxElements || stride < 0 || stride > kMaxElements ||
        __builtin_mul_overflow(size - 1, stride, &reach) ||
        __builtin_add_overflow(last, reach, &last) || last > kMaxElements) {
      return false;
    }
  }
  return true;
}

bool are_arguments(const CudaLaunch& launch, std::span<const std::int64_t> values) {
  using Kind = CudaLaunch::Argument::Kind;
  using Type = CudaLaunch::Argument::Type;
  return std::ranges::all_of(launch.arguments, [&](const CudaLaunch::Argument& argument) {
    if (argument.kind == Kind::kPart) {
      const std::int64_t offset = values[argument.value];
      return offset >= 0 && offset <= kMaxBytes;
    }
    if (argument.kind == Kind::kNumber && argument.type == Type::kInt32) {
      const std::int64_t number = values[argument.index];
      return number >= std::numeric_limits<std::int32_t>::min() && number <= kMaxElements;
    }
    return true;
  });
}

}  // namespace

bool CudaShapePlan::compute(std::span<const std::int64_t> symbols,
                            std::span<std::int64_t> values) const noexcept {
  const auto holds = [&](const SizeExpression& guard) {
    return guard.evaluate(symbols).value_or(0) != 0;
  };
  if (!std::ranges::all_of(guards, holds)) {
    return false;
  }
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const std::optional<std::int64_t> value = numbers[i].evaluate(symbols);
    if (!value) {
      return false;
    }
    values[i] = *value;
  }
  const auto is_launch = [&](const CudaLaunch& launch) {
    const auto blocks = [&](std::size_t at) {
      return static_cast<std::uint64_t>(values[launch.grid[at]]);  // a negative one is far too many
    };
    return is_grid({blocks(0), blocks(1), blocks(2)}) && are_arguments(launch, values);
  };
  const auto is_buffer = [&](Index bytes) {
    return values[bytes] >= 1 && values[bytes] <= kMaxBytes;
  };
  return values[elements] <= kMaxElements && std::ranges::all_of(scratch, is_buffer) &&
         std::ranges::all_of(outputs, [&](const Output& o) { return is_tensor(o, values); }) &&
         std::ranges::all_of(launches, is_launch);
}

Result<CudaShapePlan> parse_cuda_shape_plan(std::string_view text) {
  const Result<json> read = read_plan(text, kCudaShapePlanName, kCudaShapePlanVersion,
                                      {"choice", "elements", "guards", "inputs", "launches",
                                       "numbers", "outputs", "pattern", "scratch", "version"});
  if (!read) {
    return read.status();
  }
  const json& all = read.value();
  CudaShapePlan plan;
  const auto inputs = read_number(all["inputs"], CudaShapePlan::kMaxInputs);
  auto pattern = read_pattern(all["pattern"], inputs.value_or(0));
  auto choice = read_choice(all["choice"]);
  if (!inputs || !pattern || !choice) {
    return malformed_cuda_shape_plan("inputs, pattern or choice");
  }
  plan.num_inputs = *inputs;
  plan.pattern = std::move(*pattern);
  plan.choice = std::move(*choice);
  const std::size_t symbols = plan.pattern.symbols.size();
  auto numbers = read_expressions(all["numbers"], symbols, CudaShapePlan::kMaxNumbers);
  auto guards = read_expressions(all["guards"], symbols, CudaShapePlan::kMaxGuards);
  if (!numbers || numbers->empty() || !guards) {
    return malformed_cuda_shape_plan("numbers or guards");
  }
  plan.numbers = std::move(*numbers);
  plan.guards = std::move(*guards);
  const std::size_t count = plan.numbers.size();
  const auto elements = index_in(all["elements"], count);
  auto outputs = read_sized_outputs(all["outputs"], count);
  auto scratch = indices_in(all["scratch"], count, CudaShapePlan::kMaxScratch);
  if (!elements || !outputs || !scratch) {
    return malformed_cuda_shape_plan("elements, outputs or scratch");
  }
  plan.elements = *elements;
  plan.outputs = std::move(*outputs);
  plan.scratch = std::move(*scratch);
  const CudaLaunchLimits limits{
      .inputs = plan.num_inputs,
      .pointers = plan.num_inputs + plan.outputs.size() + plan.scratch.size(),
      .numbers = count,
  };
  auto launches = read_cuda_launches(all["launches"], limits);
  if (!launches) {
    return malformed_cuda_shape_plan("launches");
  }
  plan.launches = std::move(*launches);
  plan.num_objects = count_objects(plan.launches);
  return plan;
}

}  // namespace eagercache
