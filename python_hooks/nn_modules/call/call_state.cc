#include "python_hooks/nn_modules/call/call_state.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <exception>
#include <optional>
#include <utility>

#include "dispatcher/hook/inside_guard.h"
#include "dispatcher/hook/thread_state.h"
#include "guards/builder/key_builder.h"

namespace eagercache {
namespace {

// Above a module's forward a mode's snapshot counts too.
constexpr c10::DispatchKeySet kForeignToModules =
    kForeignState | c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot);

// Whether a level of forward-mode AD is open, in any thread: tangents may hide in any tensor that a
// forward reads, in parameters, buffers, attributes, globals and closures, and kernels know of
// none.
bool forward_gradients_are_made() {
  return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

// PyTorch settles the order in which back ends of attention are tried when a process first chooses
// one on a GPU. Before that it would be another call's.
void settle_attention_order(c10::Device device) {
  static bool is_settled = false;  // under the GIL
  if (std::exchange(is_settled, true)) [[likely]] {
    return;
  }
  try {
    const InsideGuard inside;
    const c10::InferenceMode mode;
    const at::Tensor nothing = at::empty({1, 1, 0, 8}, at::device(device).dtype(at::kHalf));
    at::_fused_sdp_choice(nothing, nothing, nothing);
  } catch (const std::exception&) {
    // There may be another kernel for the first call and for those after it.
  }
}

}  // namespace

ModuleAside thread_reason() {
  if (thread_state_reason(kForeignToModules) != AsideReason::kNone ||
      at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing() ||
      at::in_parallel_region() || forward_gradients_are_made()) [[unlikely]] {
    return ModuleAside::kDispatchState;
  }
  const at::Context& context = at::globalContext();
  if (!context.userEnabledFlashSDP() || !context.userEnabledMemEfficientSDP() ||
      !context.userEnabledMathSDP() || !context.userEnabledCuDNNSDP()) [[unlikely]] {
    return ModuleAside::kGlobalState;
  }
  return ModuleAside::kNone;
}

void put_state(ModuleCallForm& form, c10::Device device) {
  GlobalState state = read_global_state();
  Word priorities = 0;
  if (device.is_cuda()) {
    state.num_threads = 1;  // of the host, where nothing is computed
    settle_attention_order(device);
    for (const at::SDPBackend backend : at::globalContext().sDPPriorityOrder()) {
      priorities = (priorities << 8) | (static_cast<Word>(backend) & 0xFF);
    }
  }
  KeyBuffer key;
  key.put_state(state);
  form.words.append(key.words().begin(), key.words().end());
  Word autocast = 0;
  for (const c10::DeviceType type : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
    const bool enabled = at::autocast::is_autocast_enabled(type);
    const auto dtype = static_cast<Word>(at::autocast::get_autocast_dtype(type));
    autocast = (autocast << 16) | (enabled ? 0x100 | dtype : 0);
  }
  form.words.push_back(autocast);
  form.words.push_back(priorities);
  form.words.push_back(device.is_cuda() ? static_cast<Word>(device.index()) + 1 : 0);
}

ModuleAside find_device(const ModuleGuard& guard, const ModuleCallForm& form, c10::Device* device) {
  const std::optional<c10::Device> own = guard.device();
  *device = own.value_or(form.device.value_or(c10::Device(c10::DeviceType::CPU)));
  if (form.device.value_or(*device) != *device) {
    return ModuleAside::kTensorKind;
  }
  if (device->is_cuda() &&
      c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice() != *device) {
    return ModuleAside::kGlobalState;
  }
  return ModuleAside::kNone;
}

}  // namespace eagercache
