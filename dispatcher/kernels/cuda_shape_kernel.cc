#include "dispatcher/kernels/cuda_shape_kernel.h"

#include <c10/core/DeviceGuard.h>

#include <array>
#include <utility>

#include "dispatcher/device/device_stream.h"
#include "dispatcher/kernels/cuda_kernel.h"

namespace eagercache {
namespace {

using Symbols = std::array<std::int64_t, ShapePattern::kMaxSymbols>;
using Numbers = std::array<std::int64_t, CudaShapePlan::kMaxNumbers>;

// The sizes or strides of an output.
std::span<const std::int64_t> gather(const std::vector<CudaShapePlan::Index>& indices,
                                     const Numbers& numbers,
                                     std::array<std::int64_t, CudaShapePlan::kMaxRank>& into) {
  for (std::size_t i = 0; i < indices.size(); ++i) {
    into[i] = numbers[indices[i]];
  }
  return {into.data(), indices.size()};
}

}  // namespace

CudaShapeKernel::CudaShapeKernel(c10::Device device, CudaShapePlan plan, CudaLauncher launcher)
    : device_(device), plan_(std::move(plan)), launcher_(std::move(launcher)) {}

Result<std::unique_ptr<CudaShapeKernel>> CudaShapeKernel::create(
    c10::Device device, CudaShapePlan plan, std::span<const std::string> objects) {
  if (objects.size() != plan.num_objects) {
    return Status(StatusCode::kCorrupt, "the launch plan names another number of objects");
  }
  Result<CudaLauncher> launcher = CudaLauncher::load(device, objects, plan.launches);
  if (!launcher) {
    return launcher.status();
  }
  CudaKernel::count_loaded();
  return std::unique_ptr<CudaShapeKernel>(
      new CudaShapeKernel(device, std::move(plan), std::move(launcher).value()));
}

ShapeKernel::Admission CudaShapeKernel::admits(std::span<const Word> words) const noexcept {
  Symbols symbols;  // uninitialised: see run()
  Numbers numbers;
  if (!matches(plan_.pattern, words, symbols) || !plan_.compute(symbols, numbers)) {
    return Admission::kRefused;
  }
  return plan_.chooses_kernel(numbers[plan_.elements]) ? Admission::kKernel : Admission::kNative;
}

LoadedKernel::Outcome CudaShapeKernel::run(std::span<const at::Tensor* const> inputs,
                                           std::span<at::Tensor> outputs,
                                           c10::Device device) noexcept {
  if (inputs.size() != plan_.num_inputs || outputs.size() != plan_.outputs.size() ||
      device != device_) {
    return Outcome::kNotStarted;
  }
  try {
    Symbols symbols;  // uninitialised: on the path of a hit
    Numbers numbers;
    if (!read_symbols(plan_.pattern, inputs, symbols)) {
      return Outcome::kFailed;
    }
    void* stream = nullptr;
    const c10::DeviceGuard guard(device_);
    if (!plan_.compute(symbols, numbers) || !current_stream(device_, &stream)) {
      return Outcome::kNotStarted;
    }
    std::array<void*, CudaShapePlan::kMaxPointers> pointers;
    void** next = pointers.data();
    for (const at::Tensor* input : inputs) {
      *next++ = const_cast<void*>(input->const_data_ptr());  // kernels read them as const
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const CudaShapePlan::Output& wanted = plan_.outputs[i];
      std::array<std::int64_t, CudaShapePlan::kMaxRank> sizes;
      std::array<std::int64_t, CudaShapePlan::kMaxRank> strides;
      const auto lengths = gather(wanted.sizes, numbers, sizes);
      const auto steps = gather(wanted.strides, numbers, strides);
      outputs[i] = allocate_cuda_output(wanted.dtype, {lengths.data(), lengths.size()},
                                        {steps.data(), steps.size()});
      *next++ = outputs[i].mutable_data_ptr();
    }
    std::size_t bytes = 0;
    for (const CudaShapePlan::Index index : plan_.scratch) {
      bytes += padded_bytes(static_cast<std::size_t>(numbers[index]));
    }
    c10::DataPtr scratch;  // given back when the launches are queued; the next owner is behind them
    if (bytes != 0) {
      scratch = allocate_cuda_scratch(bytes);
      auto* buffer = static_cast<std::byte*>(scratch.get());
      for (const CudaShapePlan::Index index : plan_.scratch) {
        *next++ = buffer;
        buffer += padded_bytes(static_cast<std::size_t>(numbers[index]));
      }
    }
    const std::span<const std::int64_t> own(numbers.data(), plan_.numbers.size());
    return outcome_of_launch(
        launcher_.run(plan_.launches, {inputs, pointers.data(), own}, /*writes=*/false, stream));
  } catch (...) {
    return Outcome::kNotStarted;
  }
}

}  // namespace eagercache
