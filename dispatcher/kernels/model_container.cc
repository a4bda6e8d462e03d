#include "dispatcher/kernels/model_container.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/alias.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/device/device_stream.h"

namespace eagercache {
namespace {

using CreateFunction = std::int32_t (*)(void**, std::size_t, const char*, const char*);
using TextFunction = const char* (*)();
using CountFunction = std::int32_t (*)(void*, std::size_t*);
using NameFunction = std::int32_t (*)(void*, std::size_t, const char**);

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

// What the C ABI calls a proxy executor: the object as its base class.
void* proxy_of(OperatorCalls* calls) noexcept {
  return static_cast<torch::aot_inductor::ProxyExecutor*>(calls);
}

void drop(std::span<ModelContainer::TensorHandle> handles) noexcept {
  for (ModelContainer::TensorHandle handle : handles) {
    delete static_cast<at::Tensor*>(handle);
  }
}

// Puts the current device of `type` back, which a container's constructor changes behind c10's
// back.
class DeviceKeeper {
 public:
  explicit DeviceKeeper(c10::DeviceType type) {
    if (type != c10::DeviceType::CPU) {
      guard_.emplace(type);
      before_ = guard_->getDevice();
    }
  }
  ~DeviceKeeper() {
    if (guard_) {
      guard_->uncheckedSetDevice(before_);
    }
  }
  DeviceKeeper(const DeviceKeeper&) = delete;
  DeviceKeeper& operator=(const DeviceKeeper&) = delete;

 private:
  std::optional<c10::impl::VirtualGuardImpl> guard_;
  c10::Device before_ = c10::Device(c10::DeviceType::CPU);
};

// The same memory as a tensor that is no view to autograd. Operators that a container calls, such
// as attention, make theirs where views are noted; eager's make them below. One that is noted as
// made without gradients may not be written to with a tensor that needs some.
at::Tensor without_base(at::Tensor tensor) {
  if (!tensor.defined() || !tensor.is_view()) [[likely]] {
    return tensor;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return at::alias(tensor);
}

// Moves the tensors out of the handles and deletes those, but for what a `lender` has.
void take(std::span<ModelContainer::TensorHandle> handles, std::span<at::Tensor> outputs,
          const ContainerFrame* lender) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (auto* tensor = static_cast<at::Tensor*>(handles[i])) {
      outputs[i] = without_base(std::move(*tensor));
      if (lender == nullptr || !lender->has(tensor)) {
        delete tensor;
      }
    }
  }
}

}  // namespace

Result<std::unique_ptr<ModelContainer>> ModelContainer::open(const SharedLibrary& library,
                                                             c10::Device device,
                                                             const Limits& limits) {
  constexpr const char* kCreate = "AOTInductorModelContainerCreateWithDevice";
  constexpr const char* kRun = "AOTInductorModelContainerRunSingleThreaded";
  const auto create = reinterpret_cast<CreateFunction>(library.symbol(kCreate));
  if (create == nullptr) {
    return missing(kCreate);
  }
  std::unique_ptr<ModelContainer> model(new ModelContainer());
  model->library_ = library;
  model->run_ = reinterpret_cast<RunFunction>(library.symbol(kRun));
  if (model->run_ == nullptr) {
    return missing(kRun);
  }
  if (const auto calls = reinterpret_cast<TextFunction>(library.symbol(OperatorCalls::kSymbol))) {
    auto parsed = OperatorCalls::parse(calls());
    if (!parsed) {
      return parsed.status();
    }
    model->operators_ = std::move(parsed).value();
  }
  const std::string device_text = device.str();
  std::optional<RelaxedCapture> relaxed;
  if (!device.is_cpu()) {
    relaxed.emplace();
  }
  const DeviceKeeper keeper(device.type());
  if (create(&model->container_, 1, device_text.c_str(), nullptr) != 0) {
    return Status(StatusCode::kIncompatible, "the kernel's container could not be made");
  }
  std::size_t num_constants = 0;
  for (const auto& [symbol, count] :
       {std::pair{"AOTInductorModelContainerGetNumInputs", &model->num_inputs_},
        std::pair{"AOTInductorModelContainerGetNumOutputs", &model->num_outputs_},
        std::pair{"AOTInductorModelContainerGetNumConstants", &num_constants}}) {
    if (Status status = read_count(library, symbol, model->container_, count); !status) {
      return status;
    }
  }
  if (num_constants != 0 && !limits.constants) {
    return Status(StatusCode::kIncompatible, "the kernel's container holds constants");
  }
  if (model->num_inputs_ > limits.inputs || model->num_outputs_ > limits.outputs) {
    return Status(StatusCode::kIncompatible, "the kernel takes or returns too many tensors");
  }
  model->lends_ = device.is_cpu() && ContainerFrame::connect(library);
  return model;
}

std::vector<std::string> ModelContainer::input_names() const {
  const auto name_of =
      reinterpret_cast<NameFunction>(library_->symbol("AOTInductorModelContainerGetInputName"));
  std::vector<std::string> names;
  for (std::size_t i = 0; name_of != nullptr && i < num_inputs_; ++i) {
    const char* name = nullptr;
    if (name_of(container_, i, &name) != 0 || name == nullptr) {
      return {};
    }
    names.emplace_back(name);
  }
  return names;
}

LoadedKernel::Outcome ModelContainer::run(std::span<TensorHandle> inputs,
                                          std::span<at::Tensor> outputs,
                                          c10::Device device) noexcept {
  if (ran_once_.load(std::memory_order_acquire)) [[likely]] {
    return run_now(inputs, outputs, device, nullptr);
  }
  return run_first(inputs, outputs, device);
}

LoadedKernel::Outcome ModelContainer::run_first(std::span<TensorHandle> inputs,
                                                std::span<at::Tensor> outputs,
                                                c10::Device device) noexcept {
  std::unique_lock lock(first_run_mutex_, std::try_to_lock);
  if (!lock.owns_lock() || is_capturing(device)) {
    drop(inputs);
    return LoadedKernel::Outcome::kNotStarted;
  }
  if (ran_once_.load(std::memory_order_relaxed)) {
    return run_now(inputs, outputs, device, nullptr);  // another thread's ended meanwhile
  }
  std::optional<RelaxedCapture> relaxed;
  if (!device.is_cpu()) {
    relaxed.emplace();
  }
  if (watcher_) {
    watcher_(true);
  }
  made_.clear();
  const LoadedKernel::Outcome outcome = run_now(inputs, outputs, device, &made_);
  if (watcher_) {
    watcher_(false);
  }
  if (outcome == LoadedKernel::Outcome::kAnswered) {
    ran_once_.store(true, std::memory_order_release);
  }
  return outcome;
}

LoadedKernel::Outcome ModelContainer::run_now(std::span<TensorHandle> inputs,
                                              std::span<at::Tensor> outputs, c10::Device device,
                                              std::vector<ContainerFrame::Made>* noted) noexcept {
  void* stream = nullptr;
  if (inputs.size() != num_inputs_ || outputs.size() != num_outputs_) {
    drop(inputs);
    return LoadedKernel::Outcome::kFailed;
  }
  if (!current_stream(device, &stream)) {
    drop(inputs);
    return LoadedKernel::Outcome::kNotStarted;
  }
  try {
    std::optional<c10::DeviceGuard> guard;
    if (!device.is_cpu()) {
      guard.emplace(device);
    }
    std::optional<ContainerFrame> frame;
    if (lends_) {
      frame.emplace(noted);
    }
    c10::SmallVector<TensorHandle, 16> output_handles(outputs.size(), nullptr);
    OperatorCalls::take_raised();
    // The arrays stay ours; the container takes the inputs' tensors and gives us the outputs'.
    const std::int32_t error = run_(container_, inputs.data(), inputs.size(), output_handles.data(),
                                    outputs.size(), stream, proxy_of(operators_.get()));
    take(output_handles, outputs, nullptr);
    if (error == 0) {
      return LoadedKernel::Outcome::kAnswered;
    }
    return OperatorCalls::has_raised() || is_fault_of_device(device)
               ? LoadedKernel::Outcome::kNotStarted
               : LoadedKernel::Outcome::kFailed;
  } catch (...) {
    return LoadedKernel::Outcome::kFailed;
  }
}

LoadedKernel::Outcome ModelContainer::run_lent(std::span<const at::Tensor* const> inputs,
                                               std::span<at::Tensor> outputs) noexcept {
  if (inputs.size() != num_inputs_ || outputs.size() != num_outputs_) {
    return LoadedKernel::Outcome::kFailed;
  }
  try {
    std::array<TensorHandle, ContainerFrame::kMostInputs> handles;
    const ContainerFrame frame(made_, inputs, handles.data());
    c10::SmallVector<TensorHandle, 16> output_handles(outputs.size(), nullptr);
    const std::int32_t error =
        run_(container_, handles.data(), inputs.size(), output_handles.data(), outputs.size(),
             nullptr, proxy_of(operators_.get()));
    take(output_handles, outputs, &frame);
    return error == 0 ? LoadedKernel::Outcome::kAnswered : LoadedKernel::Outcome::kFailed;
  } catch (...) {
    return LoadedKernel::Outcome::kFailed;
  }
}

}  // namespace eagercache
