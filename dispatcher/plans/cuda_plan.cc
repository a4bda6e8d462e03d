#include "dispatcher/plans/cuda_plan.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "dispatcher/plans/plan_fields.h"
#include "guards/key/scalar_class.h"

namespace eagercache {
namespace {

using nlohmann::json;

constexpr std::int64_t kCudaPlanVersion = 1;
constexpr std::int64_t kCudaScalarPlanVersion = 1;
constexpr std::string_view kCudaPlanName = "launch plan for CUDA";

Status malformed_cuda_plan(const char* what) { return malformed_plan(kCudaPlanName, what); }

// A plan that takes so many numbers of the call.
Result<CudaPlan> read_cuda_plan(std::string_view text, std::size_t num_scalars) {
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
  const CudaLaunchLimits limits{
      .inputs = plan.num_inputs,
      .pointers = plan.num_inputs + plan.outputs.size() + plan.scratch.size(),
      .scalars = num_scalars,
  };
  auto launches = read_cuda_launches(all["launches"], limits);
  if (!launches) {
    return malformed_cuda_plan("launches");
  }
  plan.launches = std::move(*launches);
  plan.num_objects = count_objects(plan.launches);
  plan.num_scalars = num_scalars;
  return plan;
}

}  // namespace

Result<CudaPlan> parse_cuda_plan(std::string_view text) { return read_cuda_plan(text, 0); }

Result<CudaPlan> parse_cuda_scalar_plan(std::string_view text) {
  constexpr std::string_view kName = "scalar plan for CUDA";
  const Result<json> read =
      read_plan(text, kName, kCudaScalarPlanVersion, {"plan", "scalars", "version"});
  if (!read) {
    return read.status();
  }
  const auto scalars = read_number(read.value()["scalars"], kMaxScalars);
  if (!scalars || *scalars == 0) {
    return malformed_plan(kName, "scalars");
  }
  return read_cuda_plan(read.value()["plan"].dump(), *scalars);
}

}  // namespace eagercache
