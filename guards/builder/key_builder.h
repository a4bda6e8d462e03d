#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <memory>
#include <span>

#include "guards/builder/argument_plan.h"
#include "guards/builder/aside_reason.h"
#include "guards/key/call_key.h"

namespace eagercache {

// The tensors of one call in argument order, list elements included, undefined ones and holes left
// out: what a kernel takes as its inputs. Points into the caller's stack; no ownership.
class TensorArguments {
 public:
  static constexpr std::size_t kInline = 64;  // more of them take one allocation
  static constexpr std::size_t kCapacity = 1024;

  TensorArguments() noexcept {}  // inline_ stays uninitialised: it is on the path of every call
  TensorArguments(const TensorArguments&) = delete;
  TensorArguments& operator=(const TensorArguments&) = delete;
  void clear() noexcept { size_ = 0; }
  // False when full, or without memory; the call then steps aside.
  bool push(const at::Tensor* tensor) noexcept {
    if (size_ == room_ && !grow()) [[unlikely]] {
      return false;
    }
    slots_[size_++] = tensor;
    return true;
  }
  std::size_t size() const noexcept { return size_; }
  std::span<const at::Tensor* const> view() const noexcept { return {slots_, size_}; }

 private:
  bool grow() noexcept;

  const at::Tensor* inline_[kInline];  // NOLINT(modernize-avoid-c-arrays)
  const at::Tensor** slots_ = inline_;
  std::size_t room_ = kInline;
  std::unique_ptr<const at::Tensor*[]> many_;  // NOLINT(modernize-avoid-c-arrays)
  std::size_t size_ = 0;
};

// The kernel's inputs, as a walk over the arguments finds them.
struct CallTensors {
  TensorArguments tensors;
  c10::Device device = c10::Device(c10::DeviceType::CPU);  // of the call; with index on CUDA
};

// What one walk over the arguments gives: the key, too.
struct CallView : CallTensors {
  KeyBuffer key;
};

// Reads the call once. `arguments` are the operator's own values, as many as the plan has readers
// (a boxed stack may hold more below them). `device_type` is the hook's backend. On anything but
// kNone the contents of `view` are unspecified. Allocates nothing, takes no lock, never throws.
AsideReason build_key(const ArgumentPlan& plan, std::span<const c10::IValue> arguments,
                      c10::DeviceType device_type, CallView& view) noexcept;

// This thread's current device of a type, with its index; without one where its runtime cannot say.
c10::Device current_device(c10::DeviceType type) noexcept;

// The state word of this process and thread, read through ATen's getters.
GlobalState read_global_state() noexcept;
// Adds this thread's autocast on devices of that type.
void read_autocast(c10::DeviceType device_type, GlobalState& state) noexcept;

// True when the thread rounds to nearest and keeps denormals: the only mode in which kernels
// were proved.
bool floating_point_mode_is_default() noexcept;

}  // namespace eagercache
