#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>

#include "dispatcher/hook/operator_hook.h"

namespace eagercache {

// Autocast on one kind of device.
struct AutocastState {
  c10::DeviceType device;
  bool enabled;
  c10::ScalarType dtype;

  static AutocastState of_thread(c10::DeviceType device);
  void set() const;
};

// Within a backward operator's own function: the autocast under which the formulas of its gradients
// run in eager, that of the thread that computes gradients. Autocast itself is as in the forward
// there, which the function runs again. Empty elsewhere.
std::optional<AutocastState> autocast_of_formulas();

// The gradient of an operator that is a Python function, at one autograd key. Where nothing needs a
// gradient the call goes on to the backend. Else one node is put into autograd's graph, which saves
// the arguments and calls the backward operator: that computes what it needs of the forward again,
// in one kernel with the gradients. The displaced kernel is the function itself, recorded by
// PyTorch operator by operator; it answers wherever no kernel may, and where the gradient of a
// gradient is wanted.
//
// Created once, never destroyed. Any thread, with or without the GIL.
class FunctionAutograd {
 public:
  // `key` is the autograd key of `hook`'s backend. Copies the kernel that is there now. Without
  // `backward` (the operator is itself the backward of one) every gradient is the function's own.
  FunctionAutograd(OperatorHook& hook, c10::DispatchKey key, OperatorHook* backward);
  FunctionAutograd(const FunctionAutograd&) = delete;
  FunctionAutograd& operator=(const FunctionAutograd&) = delete;

  // The boxed kernel. Throws only what the function, or the backend's kernel, throws.
  void call(c10::DispatchKeySet keys, torch::jit::Stack* stack);

  OperatorHook& backward() const noexcept { return *backward_; }
  // Remembers that native answers the backward of the forward calls with this hash: those are left
  // to the function from then on, whose recorded gradient computes nothing twice.
  void note_native_backward(std::uint64_t hash) noexcept;

 private:
  static constexpr std::size_t kRemembered = 256;

  std::span<const c10::IValue> arguments(const torch::jit::Stack& stack) const noexcept;
  // Whether kernels may answer a call that needs gradients; `hash` is its key's, 0 without one.
  bool takes_call(std::span<const c10::IValue> arguments, const torch::jit::Stack& stack,
                  std::uint64_t* hash) const noexcept;
  void answer_with_node(c10::DispatchKeySet keys, std::uint64_t hash, torch::jit::Stack* stack);

  OperatorHook& hook_;
  OperatorHook* const backward_;
  const c10::OperatorHandle op_;
  const std::size_t num_arguments_;
  const bool only_tensors_;  // no argument is a list of tensors, every return is a tensor
  const c10::KernelFunction function_;
  std::array<std::atomic<std::uint64_t>, kRemembered> native_backwards_{};
};

}  // namespace eagercache
