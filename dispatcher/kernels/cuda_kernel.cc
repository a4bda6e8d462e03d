#include "dispatcher/kernels/cuda_kernel.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include <array>
#include <atomic>
#include <utility>

#include "dispatcher/device/device_stream.h"

namespace eagercache {
namespace {

std::atomic<std::size_t> loaded{0};

constexpr c10::DispatchKeySet kCudaKeys(c10::DispatchKey::CUDA);

}  // namespace

at::Tensor allocate_cuda_output(c10::ScalarType dtype, c10::IntArrayRef sizes,
                                c10::IntArrayRef strides) {
  return at::Tensor(at::detail::empty_strided_generic(
      sizes, strides, c10::GetAllocator(c10::DeviceType::CUDA), kCudaKeys, dtype));
}

c10::DataPtr allocate_cuda_scratch(std::size_t bytes) {
  return c10::GetAllocator(c10::DeviceType::CUDA)->allocate(bytes);
}

LoadedKernel::Outcome outcome_of_launch(CudaLauncher::Outcome outcome) noexcept {
  switch (outcome) {
    case CudaLauncher::Outcome::kLaunched:
      return LoadedKernel::Outcome::kAnswered;
    case CudaLauncher::Outcome::kNotStarted:
      return LoadedKernel::Outcome::kNotStarted;
    default:
      return LoadedKernel::Outcome::kFailed;
  }
}

CudaKernel::CudaKernel(c10::Device device, CudaPlan plan, CudaLauncher launcher)
    : device_(device), plan_(std::move(plan)), launcher_(std::move(launcher)) {
  for (const std::uint64_t bytes : plan_.scratch) {
    scratch_offsets_.push_back(scratch_bytes_);
    scratch_bytes_ += padded_bytes(bytes);
  }
}

Result<std::unique_ptr<CudaKernel>> CudaKernel::create(c10::Device device, CudaPlan plan,
                                                       std::span<const std::string> objects) {
  if (objects.size() != plan.num_objects) {
    return Status(StatusCode::kCorrupt, "the launch plan names another number of objects");
  }
  Result<CudaLauncher> launcher = CudaLauncher::load(device, objects, plan.launches);
  if (!launcher) {
    return launcher.status();
  }
  count_loaded();
  return std::unique_ptr<CudaKernel>(
      new CudaKernel(device, std::move(plan), std::move(launcher).value()));
}

std::size_t CudaKernel::loaded_count() noexcept { return loaded.load(std::memory_order_relaxed); }

void CudaKernel::count_loaded() noexcept { loaded.fetch_add(1, std::memory_order_relaxed); }

LoadedKernel::Outcome CudaKernel::run(std::span<const at::Tensor* const> inputs,
                                      std::span<at::Tensor> outputs, c10::Device device) noexcept {
  return plan_.num_scalars == 0 ? run_with(inputs, outputs, device, {}) : Outcome::kNotStarted;
}

LoadedKernel::Outcome CudaKernel::run_with(std::span<const at::Tensor* const> inputs,
                                           std::span<at::Tensor> outputs, c10::Device device,
                                           std::span<const double> scalars) noexcept {
  if (inputs.size() != plan_.num_inputs || outputs.size() != plan_.outputs.size() ||
      device != device_) {
    return Outcome::kNotStarted;
  }
  try {
    const c10::DeviceGuard guard(device_);
    void* stream = nullptr;
    if (!current_stream(device_, &stream)) {
      return Outcome::kNotStarted;
    }
    std::array<void*, CudaPlan::kMaxPointers> pointers;  // uninitialised: on the path of a hit
    void** next = pointers.data();
    for (const at::Tensor* input : inputs) {
      *next++ = const_cast<void*>(input->const_data_ptr());  // kernels read them as const
    }
    for (const std::size_t written : plan_.writes) {
      pointers[written] = inputs[written]->mutable_data_ptr();
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const LaunchPlan::Output& wanted = plan_.outputs[i];
      outputs[i] = allocate_cuda_output(wanted.dtype, wanted.sizes, wanted.strides);
      *next++ = outputs[i].mutable_data_ptr();
    }
    c10::DataPtr scratch;  // given back when the launches are queued; the next owner is behind them
    if (scratch_bytes_ != 0) {
      scratch = allocate_cuda_scratch(scratch_bytes_);
      for (const std::size_t offset : scratch_offsets_) {
        *next++ = static_cast<std::byte*>(scratch.get()) + offset;
      }
    }
    return outcome_of_launch(launcher_.run(plan_.launches, {inputs, pointers.data(), {}, scalars},
                                           !plan_.writes.empty(), stream));
  } catch (...) {
    return Outcome::kNotStarted;
  }
}

}  // namespace eagercache
