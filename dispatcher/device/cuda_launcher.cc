#include "dispatcher/device/cuda_launcher.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <bit>
#include <utility>

namespace eagercache {
namespace {

using Argument = CudaLaunch::Argument;

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
std::uint64_t read_input(const at::Tensor& number, Argument::Type type) {
  using Type = Argument::Type;
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

// A whole number as a kernel takes it.
std::uint64_t bits_of(std::int64_t number, Argument::Type type) noexcept {
  return type == Argument::Type::kInt32
             ? std::bit_cast<std::uint32_t>(static_cast<std::int32_t>(number))
             : std::bit_cast<std::uint64_t>(number);
}

// A number of the call as a kernel takes it.
std::uint64_t bits_of(double number, Argument::Type type) noexcept {
  return type == Argument::Type::kFloat32 ? std::bit_cast<std::uint32_t>(static_cast<float>(number))
                                          : std::bit_cast<std::uint64_t>(number);
}

// 1 by it, rounded as native's kernels of division by a number compute it.
std::uint64_t inverse_bits_of(double number, Argument::Type type) noexcept {
  return type == Argument::Type::kFloat32
             ? std::bit_cast<std::uint32_t>(1.0F / static_cast<float>(number))
             : std::bit_cast<std::uint64_t>(1.0 / number);
}

// The bits that a launch passes. Throws for a number that is none.
std::uint64_t bits_of(const Argument& argument, const CudaLauncher::Passed& passed) {
  const auto address = [&] {
    return reinterpret_cast<std::uintptr_t>(passed.pointers[argument.index]);
  };
  switch (argument.kind) {
    case Argument::Kind::kPointer:
      return address() + argument.value;
    case Argument::Kind::kPart:
      return address() + static_cast<std::uint64_t>(passed.numbers[argument.value]);
    case Argument::Kind::kInput:
      return read_input(*passed.inputs[argument.index], argument.type);
    case Argument::Kind::kNumber:
      return bits_of(passed.numbers[argument.index], argument.type);
    case Argument::Kind::kScalar:
      return bits_of(passed.scalars[argument.index], argument.type);
    case Argument::Kind::kInverse:
      return inverse_bits_of(passed.scalars[argument.index], argument.type);
    case Argument::Kind::kValue:
      return argument.value;
    default:
      return 0;
  }
}

Status driver_error(const CudaDriver& driver, const char* what, CudaDriver::Result error) {
  return {StatusCode::kIncompatible, std::string(what) + ": " + driver.describe(error)};
}

}  // namespace

Result<CudaLauncher> CudaLauncher::load(c10::Device device, std::span<const std::string> objects,
                                        std::span<const CudaLaunch> launches) {
  const CudaDriver* const driver = CudaDriver::get();
  if (driver == nullptr) {
    return Status(StatusCode::kIncompatible, "there is no CUDA driver (libcuda.so.1)");
  }
  if (!device.is_cuda() || !device.has_index()) {
    return Status(StatusCode::kIncompatible, "the plan is for CUDA, the call is not");
  }
  int handle = 0;
  void* context = nullptr;
  if (const auto error = driver->device_get(&handle, device.index())) {
    return driver_error(*driver, "cuDeviceGet", error);
  }
  if (const auto error = driver->primary_ctx_retain(&context, handle)) {
    return driver_error(*driver, "cuDevicePrimaryCtxRetain", error);
  }
  CudaLauncher launcher(*driver, context);
  if (Status status = launcher.load_functions(objects, launches); !status) {
    return status;
  }
  return launcher;
}

Status CudaLauncher::load_functions(std::span<const std::string> objects,
                                    std::span<const CudaLaunch> launches) {
  const RelaxedCapture relaxed;
  const CurrentContext current(*driver_, context_);
  if (!current.ok()) {
    return {StatusCode::kIncompatible, "the device's context cannot be made current"};
  }
  std::vector<void*> modules;
  for (const std::string& object : objects) {
    void* module = nullptr;
    if (const auto error = driver_->module_load_data(&module, object.data())) {
      return driver_error(*driver_, "cuModuleLoadData", error);
    }
    modules.push_back(module);
  }
  for (const CudaLaunch& launch : launches) {
    void* function = nullptr;
    if (launch.object >= modules.size()) {
      return {StatusCode::kCorrupt, "the launch plan names another number of objects"};
    }
    if (const auto error = driver_->module_get_function(&function, modules[launch.object],
                                                        launch.function.c_str())) {
      return driver_error(*driver_, "cuModuleGetFunction", error);
    }
    if (launch.shared > CudaDriver::kPlainSharedBytes) {
      if (const auto error = driver_->func_set_attribute(
              function, CudaDriver::kMaxDynamicSharedSize, static_cast<int>(launch.shared))) {
        return driver_error(*driver_, "cuFuncSetAttribute", error);
      }
    }
    // Not at the first launch, which may be inside a capture.
    if (driver_->func_load != nullptr) {
      if (const auto error = driver_->func_load(function)) {
        return driver_error(*driver_, "cuFuncLoad", error);
      }
    }
    functions_.push_back(function);
  }
  return Status::ok();
}

CudaLauncher::Outcome CudaLauncher::run(std::span<const CudaLaunch> launches, const Passed& passed,
                                        bool writes, void* stream) const noexcept {
  const CurrentContext current(*driver_, context_);
  if (!current.ok()) {
    return Outcome::kNotStarted;
  }
  for (std::size_t i = 0; i < launches.size(); ++i) {
    const CudaLaunch& launch = launches[i];
    std::array<std::uint64_t, CudaLaunch::kMaxArguments> values;  // uninitialised: a hit's path
    std::array<void*, CudaLaunch::kMaxArguments> parameters;
    try {
      for (std::size_t j = 0; j < launch.arguments.size(); ++j) {
        parameters[j] = &values[j];
        values[j] = bits_of(launch.arguments[j], passed);
      }
    } catch (...) {
      return Outcome::kFailed;
    }
    const auto blocks = [&](std::size_t at) {
      return passed.numbers.empty() ? launch.grid[at]
                                    : static_cast<std::uint32_t>(passed.numbers[launch.grid[at]]);
    };
    const CudaDriver::Result error =
        driver_->launch_kernel(functions_[i], blocks(0), blocks(1), blocks(2), launch.threads, 1, 1,
                               launch.shared, stream, parameters.data(), nullptr);
    if (error != CudaDriver::kSuccess) [[unlikely]] {
      const bool ours = !is_sticky_cuda_error(error) && error != CudaDriver::kOutOfMemory;
      // After the first launch arguments may have been written.
      return ours || (i > 0 && writes) ? Outcome::kFailed : Outcome::kNotStarted;
    }
  }
  return Outcome::kLaunched;
}

}  // namespace eagercache
