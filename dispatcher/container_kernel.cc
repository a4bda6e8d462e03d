#include "dispatcher/container_kernel.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "dispatcher/device_stream.h"
#include "guards/key_builder.h"

namespace eagercache {
namespace {

constexpr std::size_t kMaxOutputs = 16;

using CreateFunction = std::int32_t (*)(void**, std::size_t, const char*, const char*);
using CountFunction = std::int32_t (*)(void*, std::size_t*);

Status missing(const char* symbol) {
  return {StatusCode::kIncompatible, std::string("the kernel's library has no ") + symbol};
}

Status read_count(const SharedLibrary& library, const char* symbol, void* container,
                  std::size_t* count) {
  const auto function = reinterpret_cast<CountFunction>(library.symbol(symbol));
  if (function == nullptr) {
    return missing(symbol);
  }
  if (function(container, count) != 0) {
    return {StatusCode::kIncompatible, std::string(symbol) + " failed"};
  }
  return Status::ok();
}

// Gives `tensor` native's strides when they differ in dimensions of size 1 only.
void adopt_strides(at::Tensor& tensor, const std::vector<std::int64_t>& wanted) {
  const at::IntArrayRef sizes = tensor.sizes();
  const at::IntArrayRef strides = tensor.strides();
  if (strides == at::IntArrayRef(wanted) || strides.size() != wanted.size()) {
    return;
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (strides[i] != wanted[i] && sizes[i] != 1) {
      return;
    }
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes.vec(), wanted);
}

}  // namespace

Status ContainerKernel::set_output_strides(std::string_view text) {
  if (text.empty()) {
    return Status::ok();
  }
  const nlohmann::json all = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  std::vector<std::vector<std::int64_t>> strides;
  bool sound = all.is_array() && all.size() == num_outputs_;
  for (std::size_t i = 0; sound && i < all.size(); ++i) {
    sound = all[i].is_array() && std::all_of(all[i].begin(), all[i].end(), [](const auto& value) {
              return value.is_number_integer();
            });
    if (sound) {
      strides.push_back(all[i].get<std::vector<std::int64_t>>());
    }
  }
  if (!sound) {
    return {StatusCode::kCorrupt, "the manifest's output strides are malformed"};
  }
  output_strides_ = std::move(strides);
  return Status::ok();
}

Result<std::unique_ptr<ContainerKernel>> ContainerKernel::create(const SharedLibrary& library,
                                                                 c10::Device device) {
  constexpr const char* kCreate = "AOTInductorModelContainerCreateWithDevice";
  constexpr const char* kRun = "AOTInductorModelContainerRunSingleThreaded";
  const auto create = reinterpret_cast<CreateFunction>(library.symbol(kCreate));
  if (create == nullptr) {
    return missing(kCreate);
  }
  std::unique_ptr<ContainerKernel> kernel(new ContainerKernel());
  kernel->run_ = reinterpret_cast<RunFunction>(library.symbol(kRun));
  if (kernel->run_ == nullptr) {
    return missing(kRun);
  }
  const std::string device_text = device.str();
  if (create(&kernel->container_, 1, device_text.c_str(), nullptr) != 0) {
    return Status(StatusCode::kIncompatible, "the kernel's container could not be made");
  }
  std::size_t num_constants = 0;
  for (const auto& [symbol, count] :
       {std::pair{"AOTInductorModelContainerGetNumInputs", &kernel->num_inputs_},
        std::pair{"AOTInductorModelContainerGetNumOutputs", &kernel->num_outputs_},
        std::pair{"AOTInductorModelContainerGetNumConstants", &num_constants}}) {
    if (Status status = read_count(library, symbol, kernel->container_, count); !status) {
      return status;
    }
  }
  if (num_constants != 0) {
    return Status(StatusCode::kIncompatible, "the kernel's container holds constants");
  }
  if (kernel->num_inputs_ > TensorArguments::kCapacity || kernel->num_outputs_ > kMaxOutputs) {
    return Status(StatusCode::kIncompatible, "the kernel takes or returns too many tensors");
  }
  return kernel;
}

LoadedKernel::Outcome ContainerKernel::run(std::span<const at::Tensor* const> inputs,
                                           std::span<at::Tensor> outputs,
                                           c10::Device device) noexcept {
  if (ran_once_.load(std::memory_order_acquire)) [[likely]] {
    return run_now(inputs, outputs, device);
  }
  std::unique_lock lock(first_run_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    return Outcome::kNotStarted;
  }
  const Outcome outcome = run_now(inputs, outputs, device);
  if (outcome == Outcome::kAnswered) {
    ran_once_.store(true, std::memory_order_release);
  }
  return outcome;
}

LoadedKernel::Outcome ContainerKernel::run_now(std::span<const at::Tensor* const> inputs,
                                               std::span<at::Tensor> outputs,
                                               c10::Device device) noexcept {
  if (inputs.size() != num_inputs_ || outputs.size() != num_outputs_) {
    return Outcome::kFailed;
  }
  void* stream = nullptr;
  if (!current_stream(device, &stream)) {
    return Outcome::kNotStarted;
  }
  try {
    std::optional<c10::DeviceGuard> guard;
    if (!device.is_cpu()) {
      guard.emplace(device);
    }
    // An AtenTensorHandle is an at::Tensor*; the container takes ownership of the inputs' and gives
    // us the outputs'. The arrays stay ours.
    std::array<TensorHandle, TensorArguments::kCapacity> input_handles;
    std::array<TensorHandle, kMaxOutputs> output_handles{};
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      input_handles[i] = new at::Tensor(*inputs[i]);
    }
    const std::int32_t error = run_(container_, input_handles.data(), inputs.size(),
                                    output_handles.data(), outputs.size(), stream, nullptr);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (auto* tensor = static_cast<at::Tensor*>(output_handles[i])) {
        outputs[i] = std::move(*tensor);
        delete tensor;
        if (i < output_strides_.size()) {
          adopt_strides(outputs[i], output_strides_[i]);
        }
      }
    }
    return error == 0 ? Outcome::kAnswered : Outcome::kFailed;
  } catch (...) {
    return Outcome::kFailed;
  }
}

}  // namespace eagercache
