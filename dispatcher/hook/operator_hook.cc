#include "dispatcher/hook/operator_hook.h"

// What a hook knows of its operator and of its calls. How it answers one is in operator_answer.cc.

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/hook/boxed_functor.h"
#include "guards/base/left_out.h"
#include "guards/builder/torch_compat.h"

namespace eagercache {
namespace {

// CPU time of a bare kernel, proof and timing included.
constexpr double kUsualCompileSeconds = 2.0;

c10::DeviceType device_type_of(c10::DispatchKey key) { return c10::dispatchKeyToDeviceType(key); }

bool is_large(const c10::IValue& value) {
  if (value.isTensorList()) {
    const c10::ArrayRef<c10::IValue> elements = value.toListRef();
    return std::any_of(elements.begin(), elements.end(), is_large);
  }
  return value.isTensor() && value.toTensor().defined() &&
         value.toTensor().numel() > std::numeric_limits<std::int32_t>::max();
}

}  // namespace

OperatorHook::OperatorHook(const c10::OperatorHandle& op, c10::DispatchKey key,
                           Eligibility eligibility, std::size_t index, MissQueue& misses)
    : op_(op),
      key_(key),
      device_type_(device_type_of(key)),
      eligibility_(std::move(eligibility)),
      num_fresh_(static_cast<std::size_t>(
          std::ranges::count(eligibility_.returned_arguments, Eligibility::kFresh))),
      index_(index),
      misses_(misses),
      name_(op.operator_name().name),
      overload_(op.operator_name().overload_name),
      full_name_(c10::toString(op.operator_name())),
      schema_text_(c10::toString(op.schema())),
      guard_native_(name_.starts_with("aten::")),
      native_(compat::lookup_kernel(op, key)),
      boxed_(make_boxed(*this)) {}

void OperatorHook::note_registered() { registered_ = compat::lookup_kernel(op_, key_); }

bool OperatorHook::is_shadowed() const {
  return !compat::lookup_kernel(op_, key_)._equalsBoxedAndUnboxed(registered_);
}

void OperatorHook::note_compile_cost(double cpu_seconds) noexcept {
  if (cpu_seconds <= 0) {
    return;
  }
  const double usual = std::clamp(cpu_seconds / kUsualCompileSeconds, 1.0, 64.0);
  compile_cost_.store(std::bit_floor(static_cast<std::uint64_t>(usual)), std::memory_order_relaxed);
}

c10::Device OperatorHook::device_of(std::span<const Word> words) const {
  if (device_type_ == c10::DeviceType::CPU) {
    return c10::Device(c10::DeviceType::CPU);
  }
  DecodedCall call;
  if (!decode_call(words, &call)) {
    return {device_type_, 0};
  }
  // Where a tensor is on a device and another is named, the call has no key.
  c10::DeviceIndex index = -1;
  const auto look = [&](const DecodedArgument& argument) {
    const auto type = static_cast<std::uint8_t>(device_type_);
    if (argument.kind == ArgumentKind::kTensor && argument.tensor.device_type == type) {
      index = argument.tensor.device_index;
    } else if (argument.kind == ArgumentKind::kDevice && named_device(argument).type == type) {
      index = named_device(argument).index;
    }
    return index >= 0;
  };
  for (const DecodedArgument& argument : call.arguments) {
    if (look(argument) || std::ranges::any_of(argument.elements, look)) {
      break;
    }
  }
  return {device_type_, std::max<c10::DeviceIndex>(index, 0)};
}

void OperatorHook::put_results(std::span<at::Tensor> outputs, torch::jit::Stack* stack) const {
  // What may throw comes before the arguments are dropped, so that native can still answer.
  stack->reserve(stack->size() + num_returns());
  const std::size_t num_arguments = eligibility_.plan.readers.size();
  if (eligibility_.returns_list) {
    c10::List<at::Tensor> list;
    list.reserve(outputs.size());
    for (at::Tensor& output : outputs) {
      list.push_back(std::move(output));
    }
    torch::jit::drop(*stack, num_arguments);
    stack->emplace_back(std::move(list));
    return;
  }
  if (num_fresh_ == num_returns()) [[likely]] {
    torch::jit::drop(*stack, num_arguments);
    for (at::Tensor& output : outputs) {
      stack->emplace_back(std::move(output));
    }
    return;
  }
  c10::SmallVector<c10::IValue, 4> results;
  results.reserve(num_returns());
  at::Tensor* fresh = outputs.data();
  const std::span<const c10::IValue> own = arguments(*stack);
  for (const std::size_t argument : eligibility_.returned_arguments) {
    if (argument == Eligibility::kFresh) {
      results.emplace_back(std::move(*fresh++));
    } else {
      results.push_back(own[argument]);
    }
  }
  torch::jit::drop(*stack, num_arguments);
  for (c10::IValue& result : results) {
    stack->push_back(std::move(result));
  }
}

bool OperatorHook::writes_statistics() const noexcept {
  return device_type_ == c10::DeviceType::CUDA && full_name_ == "aten::native_batch_norm";
}

bool OperatorHook::writes_in(const DecodedCall& call) const {
  const std::vector<std::string>& names = plan().names;
  return std::ranges::any_of(effects().writes, [&](const WrittenArgument& write) {
    const ArgumentKind kind = call.arguments.at(write.index).kind;
    if (kind == ArgumentKind::kNone || kind == ArgumentKind::kUndefinedTensor) {
      return false;
    }
    const auto when = std::ranges::find(names, write.when);
    if (when == names.end()) {
      return true;
    }
    const DecodedArgument& flag = call.arguments.at(static_cast<std::size_t>(when - names.begin()));
    return flag.kind != ArgumentKind::kBool || flag.payload.front() != 0;
  });
}

void OperatorHook::set_active(bool active) noexcept {
  const Lock lock(identity_mutex_);
  wanted_.store(active, std::memory_order_relaxed);
  active_.store(active && !aside_.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

void OperatorHook::set_aside(bool aside) noexcept {
  const Lock lock(identity_mutex_);
  aside_.store(aside, std::memory_order_relaxed);
  active_.store(wanted() && !aside, std::memory_order_relaxed);
}

void OperatorHook::set_identity(std::string identity) {
  const Lock lock(identity_mutex_);
  identity_ = std::move(identity);
  is_function_.store(!identity_.empty(), std::memory_order_relaxed);
}

std::string OperatorHook::identity() const {
  const Lock lock(identity_mutex_);
  return identity_;
}

Digest OperatorHook::entry_digest(std::span<const Word> words, std::string_view policy_tag) const {
  Hasher hasher("eagercache-entry-v1");
  hasher.add_text(full_name_);
  hasher.add_text(schema_text_);
  if (is_function() && !left_out("check", "function_identity")) {
    hasher.add_text("function");
    hasher.add_text(identity());
  }
  hasher.add_text(c10::toString(key_));
  if (device_type_ == c10::DeviceType::CUDA) {
    hasher.add_text(cuda_architecture(device_of(words)));
  }
  hasher.add_text(policy_tag);
  const std::vector<Word> persistent = persistent_words(words);
  hasher.add_words(persistent);
  return hasher.finish();
}

bool OperatorHook::returned_large(const torch::jit::Stack& stack) const noexcept {
  for (std::size_t i = 0; i < num_returns(); ++i) {
    if (is_large(stack[stack.size() - 1 - i])) {
      return true;
    }
  }
  return false;
}

}  // namespace eagercache
