#include "dispatcher/kernels/cuda_kernel.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <atomic>
#include <bit>
#include <optional>
#include <utility>

#include "dispatcher/device/device_stream.h"

namespace eagercache {
namespace {

// What cudaMalloc promises, and vector loads of generated code rely on.
constexpr std::size_t kDeviceAlignment = 256;

std::atomic<std::size_t> loaded{0};

constexpr c10::DispatchKeySet kCudaKeys(c10::DispatchKey::CUDA);

// Makes `context` this thread's for a block; nothing where it is already.
class CurrentContext {
 public:
  CurrentContext(const CudaDriver& driver, void* context) noexcept : driver_(driver) {
    if (driver_.ctx_get_current(&before_) != CudaDriver::kSuccess) {
      return;
    }
    changed_ = before_ != context;
    ok_ = !changed_ || driver_.ctx_set_current(context) == CudaDriver::kSuccess;
  }
  ~CurrentContext() {
    // A thread that had none keeps ours, the one that the runtime would have given it.
    if (changed_ && before_ != nullptr) {
      driver_.ctx_set_current(before_);
    }
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  bool ok() const noexcept { return ok_; }

 private:
  const CudaDriver& driver_;
  void* before_ = nullptr;
  bool changed_ = false;
  bool ok_ = false;
};

template <typename To>
std::uint64_t bits_as(const at::Tensor& number) {
  const void* const data = number.const_data_ptr();
  const auto convert = [&]<typename From>(const From* from) {
    const To value = static_cast<To>(*from);
    if constexpr (sizeof(To) == sizeof(std::uint32_t)) {
      return static_cast<std::uint64_t>(std::bit_cast<std::uint32_t>(value));
    } else {
      return std::bit_cast<std::uint64_t>(value);
    }
  };
  switch (number.scalar_type()) {
    case c10::ScalarType::Bool:
      return convert(static_cast<const bool*>(data));
    case c10::ScalarType::Byte:
      return convert(static_cast<const std::uint8_t*>(data));
    case c10::ScalarType::Char:
      return convert(static_cast<const std::int8_t*>(data));
    case c10::ScalarType::Short:
      return convert(static_cast<const std::int16_t*>(data));
    case c10::ScalarType::Int:
      return convert(static_cast<const std::int32_t*>(data));
    case c10::ScalarType::Long:
      return convert(static_cast<const std::int64_t*>(data));
    case c10::ScalarType::Half: {
      const float value = *static_cast<const c10::Half*>(data);
      return convert(&value);
    }
    case c10::ScalarType::BFloat16: {
      const float value = *static_cast<const c10::BFloat16*>(data);
      return convert(&value);
    }
    case c10::ScalarType::Float:
      return convert(static_cast<const float*>(data));
    case c10::ScalarType::Double:
      return convert(static_cast<const double*>(data));
    default:
      TORCH_CHECK(false, "a number of an unexpected dtype");
  }
}

// The number in a 0-dim CPU tensor, as a kernel takes it.
std::uint64_t read_input(const at::Tensor& number, CudaPlan::Argument::Type type) {
  using Type = CudaPlan::Argument::Type;
  switch (type) {
    case Type::kInt32:
      return bits_as<std::int32_t>(number);
    case Type::kInt64:
      return bits_as<std::int64_t>(number);
    case Type::kFloat32:
      return bits_as<float>(number);
    default:
      return bits_as<double>(number);
  }
}

}  // namespace

CudaKernel::CudaKernel(const CudaDriver& driver, c10::Device device, CudaPlan plan)
    : driver_(driver), device_(device), plan_(std::move(plan)) {
  for (const std::uint64_t bytes : plan_.scratch) {
    scratch_offsets_.push_back(scratch_bytes_);
    scratch_bytes_ += (bytes + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
  }
}

Result<std::unique_ptr<CudaKernel>> CudaKernel::create(c10::Device device, CudaPlan plan,
                                                       std::span<const std::string> objects) {
  const CudaDriver* const driver = CudaDriver::get();
  if (driver == nullptr) {
    return Status(StatusCode::kIncompatible, "there is no CUDA driver (libcuda.so.1)");
  }
  if (!device.is_cuda() || !device.has_index()) {
    return Status(StatusCode::kIncompatible, "the plan is for CUDA, the call is not");
  }
  if (objects.size() != plan.num_objects) {
    return Status(StatusCode::kCorrupt, "the launch plan names another number of objects");
  }
  std::unique_ptr<CudaKernel> kernel(new CudaKernel(*driver, device, std::move(plan)));
  if (Status status = kernel->load(objects); !status) {
    return status;
  }
  loaded.fetch_add(1, std::memory_order_relaxed);
  return kernel;
}

std::size_t CudaKernel::loaded_count() noexcept { return loaded.load(std::memory_order_relaxed); }

Status CudaKernel::load(std::span<const std::string> objects) {
  const auto failed = [&](const char* what, CudaDriver::Result error) {
    return Status(StatusCode::kIncompatible, std::string(what) + ": " + driver_.describe(error));
  };
  int handle = 0;
  if (const auto error = driver_.device_get(&handle, device_.index())) {
    return failed("cuDeviceGet", error);
  }
  if (const auto error = driver_.primary_ctx_retain(&context_, handle)) {
    return failed("cuDevicePrimaryCtxRetain", error);
  }
  const RelaxedCapture relaxed;
  const CurrentContext current(driver_, context_);
  if (!current.ok()) {
    return {StatusCode::kIncompatible, "the device's context cannot be made current"};
  }
  std::vector<void*> modules;
  for (const std::string& object : objects) {
    void* module = nullptr;
    if (const auto error = driver_.module_load_data(&module, object.data())) {
      return failed("cuModuleLoadData", error);
    }
    modules.push_back(module);
  }
  for (const CudaPlan::Launch& launch : plan_.launches) {
    void* function = nullptr;
    if (const auto error = driver_.module_get_function(&function, modules[launch.object],
                                                       launch.function.c_str())) {
      return failed("cuModuleGetFunction", error);
    }
    if (launch.shared > CudaDriver::kPlainSharedBytes) {
      if (const auto error = driver_.func_set_attribute(function, CudaDriver::kMaxDynamicSharedSize,
                                                        static_cast<int>(launch.shared))) {
        return failed("cuFuncSetAttribute", error);
      }
    }
    // Not at the first launch, which may be inside a capture.
    if (driver_.func_load != nullptr) {
      if (const auto error = driver_.func_load(function)) {
        return failed("cuFuncLoad", error);
      }
    }
    functions_.push_back(function);
  }
  return Status::ok();
}

LoadedKernel::Outcome CudaKernel::run(std::span<const at::Tensor* const> inputs,
                                      std::span<at::Tensor> outputs, c10::Device device) noexcept {
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
    c10::Allocator* const allocator = c10::GetAllocator(c10::DeviceType::CUDA);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const LaunchPlan::Output& wanted = plan_.outputs[i];
      outputs[i] = at::Tensor(at::detail::empty_strided_generic(
          wanted.sizes, wanted.strides, allocator, kCudaKeys, wanted.dtype));
      *next++ = outputs[i].mutable_data_ptr();
    }
    c10::DataPtr scratch;  // given back when the launches are queued; the next owner is behind them
    if (scratch_bytes_ != 0) {
      scratch = allocator->allocate(scratch_bytes_);
      for (const std::size_t offset : scratch_offsets_) {
        *next++ = static_cast<std::byte*>(scratch.get()) + offset;
      }
    }
    return launch_all(inputs, pointers.data(), stream);
  } catch (...) {
    return Outcome::kNotStarted;
  }
}

LoadedKernel::Outcome CudaKernel::launch_all(std::span<const at::Tensor* const> inputs,
                                             void* const* pointers, void* stream) const noexcept {
  using Kind = CudaPlan::Argument::Kind;
  const CurrentContext current(driver_, context_);
  if (!current.ok()) {
    return Outcome::kNotStarted;
  }
  for (std::size_t i = 0; i < plan_.launches.size(); ++i) {
    const CudaPlan::Launch& launch = plan_.launches[i];
    std::array<std::uint64_t, CudaPlan::kMaxArguments> values;  // uninitialised, as above
    std::array<void*, CudaPlan::kMaxArguments> parameters;
    for (std::size_t j = 0; j < launch.arguments.size(); ++j) {
      const CudaPlan::Argument& argument = launch.arguments[j];
      parameters[j] = &values[j];
      switch (argument.kind) {
        case Kind::kPointer:
          values[j] = reinterpret_cast<std::uintptr_t>(pointers[argument.index]) + argument.value;
          break;
        case Kind::kInput:
          try {
            values[j] = read_input(*inputs[argument.index], argument.type);
          } catch (...) {
            return Outcome::kFailed;
          }
          break;
        case Kind::kValue:
          values[j] = argument.value;
          break;
        case Kind::kNull:
          values[j] = 0;
          break;
      }
    }
    const CudaDriver::Result error = driver_.launch_kernel(
        functions_[i], launch.grid[0], launch.grid[1], launch.grid[2], launch.threads, 1, 1,
        launch.shared, stream, parameters.data(), nullptr);
    if (error != CudaDriver::kSuccess) [[unlikely]] {
      const bool ours = !is_sticky_cuda_error(error) && error != CudaDriver::kOutOfMemory;
      // After the first launch arguments may have been written.
      return ours || (i > 0 && !plan_.writes.empty()) ? Outcome::kFailed : Outcome::kNotStarted;
    }
  }
  return Outcome::kAnswered;
}

}  // namespace eagercache
