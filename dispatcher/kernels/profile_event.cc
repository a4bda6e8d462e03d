#include "dispatcher/kernels/profile_event.h"

#include <utility>
#include <vector>

#include "dispatcher/kernels/loaded_kernel.h"
#include "guards/key/call_key.h"

namespace eagercache {

constinit thread_local ThreadListeners thread_listeners __attribute__((tls_model("initial-exec")));

std::optional<at::StepCallbacks> profile_listeners() {
  std::optional<at::StepCallbacks> found =
      at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  thread_listeners.own = &at::get_record_function_tls_().sorted_tls_callbacks_;
  thread_listeners.unasked = found ? 0 : ThreadListeners::kUnasked;
  return found;
}

std::string event_name(std::string_view entry) {
  return "eagercache " + std::string(entry.substr(0, kShownDigits));
}

std::string module_event_name(std::string_view module, std::string_view entry) {
  return "module: " + std::string(module) + " [" + event_name(entry) + "]";
}

std::string shown_tensor(std::string_view origin, const at::Tensor& tensor) {
  std::string text = std::string(origin) + ", " +
                     scalar_type_name(static_cast<std::uint8_t>(tensor.scalar_type())) + "[";
  for (const std::int64_t size : tensor.sizes()) {
    text += (text.back() == '[' ? "" : ", ") + std::to_string(size);
  }
  return text + "]";
}

ProfileEvent::ProfileEvent(at::StepCallbacks&& listeners, std::string name,
                           std::span<const at::Tensor* const> tensors, std::int64_t sequence,
                           const Arguments& arguments) noexcept
    : event_(std::move(listeners)) {
  try {
    std::vector<c10::IValue> inputs;
    if (event_.needsInputs()) {
      for (const at::Tensor* tensor : tensors) {
        inputs.emplace_back(*tensor);
      }
    }
    event_.before(std::move(name), c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()),
                  &arguments, sequence);
  } catch (...) {
    // Out of memory: the profile lacks one event.
  }
}

void LoadedKernel::name_events(const std::string& entry) {
  event_ = (new std::string(event_name(entry)))->c_str();
}

LoadedKernel::Outcome LoadedKernel::answer_in_profile(std::span<const at::Tensor* const> inputs,
                                                      std::span<at::Tensor> outputs,
                                                      c10::Device device) noexcept {
  std::optional<ProfileEvent> event;
  if (std::optional<at::StepCallbacks> listeners = profile_listeners();
      listeners && event_ != nullptr) {
    event.emplace(std::move(*listeners), event_);  // its operator's event has the inputs
  }
  return watched([&] { return run(inputs, outputs, device); });
}

}  // namespace eagercache
