#pragma once

// What the two readers of a call share, the boxed one (key_builder.cc) and the unboxed one
// (unboxed_key.cc). For these two files alone.

#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

#include "guards/builder/key_builder.h"
#include "guards/builder/overlap.h"
#include "guards/builder/tensor_data.h"
#include "guards/builder/torch_compat.h"

namespace eagercache {

// Keys a plain dense tensor may carry at a backend kernel: its backend, and what autograd, autocast
// and view tracking add. Anything else (Python, Sparse, Quantized, Conjugate, Negative, ZeroTensor,
// NestedTensor, Functionalize, Batched ...) steps aside. One AND per tensor.
constexpr c10::DispatchKeySet allowed_keys(c10::DispatchKey backend, c10::DispatchKey autograd,
                                           c10::DispatchKey autocast) {
  return c10::DispatchKeySet({backend, autograd, autocast, c10::DispatchKey::ADInplaceOrView});
}

inline constexpr c10::DispatchKeySet kAllowedOnCpu = allowed_keys(
    c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU);
inline constexpr c10::DispatchKeySet kAllowedOnCuda = allowed_keys(
    c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCUDA);

// Types with a native CPU kernel for about everything and a lowering in Inductor.
constexpr std::uint64_t dtype_bit(c10::ScalarType type) {
  return std::uint64_t{1} << static_cast<unsigned>(type);
}
inline constexpr std::uint64_t kCommonDtypes =
    dtype_bit(c10::ScalarType::Byte) | dtype_bit(c10::ScalarType::Char) |
    dtype_bit(c10::ScalarType::Short) | dtype_bit(c10::ScalarType::Int) |
    dtype_bit(c10::ScalarType::Long) | dtype_bit(c10::ScalarType::Half) |
    dtype_bit(c10::ScalarType::Float) | dtype_bit(c10::ScalarType::Double) |
    dtype_bit(c10::ScalarType::ComplexFloat) | dtype_bit(c10::ScalarType::ComplexDouble) |
    dtype_bit(c10::ScalarType::Bool) | dtype_bit(c10::ScalarType::BFloat16);

inline constexpr std::int64_t kMaxExtent = std::numeric_limits<std::int32_t>::max();

// One walk's state. Methods return kNone to go on. `Key` is a KeyBuffer, or a KeyMatcher: then what
// follows from the words alone need not be looked at, since a key of these words has passed.
// `kOnCpu` is known where speed counts; without it the device is told when the walk is made.
template <typename Key, bool kOnCpu = false>
class Walk {
 public:
  static constexpr bool kIsNew = std::is_same_v<Key, KeyBuffer>;

  Walk(c10::DeviceType device_type, Key& key, CallTensors& call) noexcept
      : key_(key),
        call_(call),
        device_type_(device_type),
        disallowed_(~(is_cpu() ? kAllowedOnCpu : kAllowedOnCuda).raw_repr()) {}

  // Inlined, because it is most of what a hit costs here.
  [[gnu::always_inline]] AsideReason tensor(const at::Tensor& tensor) noexcept {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!tensor.defined()) {
      key_.put_undefined_tensor();
      return AsideReason::kNone;
    }
    bool host_number = false;
    const std::uint64_t disallowed = kOnCpu ? ~kAllowedOnCpu.raw_repr() : disallowed_;
    if ((impl->key_set().raw_repr() & disallowed) != 0) [[unlikely]] {
      host_number = is_host_number(*impl);
      if (!host_number) {
        const AsideReason reason = kind_or_device(*impl);
        if (applies(reason)) return reason;
      }
    }
    const c10::IntArrayRef sizes = impl->sizes();
    const c10::IntArrayRef strides = impl->strides();
    const c10::ScalarType dtype = c10::typeMetaToScalarType(impl->dtype());
    if (const AsideReason reason = check_fields(*impl, sizes, dtype, host_number);
        reason != AsideReason::kNone) [[unlikely]] {
      return reason;
    }
    if (impl->unsafe_storage().unsafeGetStorageImpl()->data() == nullptr &&
        applies(AsideReason::kNoStorage)) [[unlikely]] {
      return AsideReason::kNoStorage;
    }
    if (kIsNew && is_large(*impl, sizes, strides) && applies(AsideReason::kLargeExtent))
        [[unlikely]] {
      return AsideReason::kLargeExtent;
    }
    TensorTraits traits;
    traits.dtype = static_cast<std::uint8_t>(dtype);
    const bool in_host_memory = is_cpu() || host_number;
    traits.device_type =
        static_cast<std::uint8_t>(in_host_memory ? c10::DeviceType::CPU : device_type_);
    traits.device_index =
        in_host_memory ? std::int8_t{-1} : static_cast<std::int8_t>(call_.device.index());
    traits.dim = static_cast<std::uint8_t>(sizes.size());
    traits.wrapped_number = impl->is_wrapped_number();
    traits.aligned = reinterpret_cast<std::uintptr_t>(data_of(*impl)) % kAlignment == 0;
    if constexpr (kIsNew) {
      all_integral_ = all_integral_ && c10::isIntegralType(dtype, /*includeBool=*/true);
    }
    key_.put_tensor(traits, sizes.data(), strides.data());
    return call_.tensors.push(&tensor) || !applies(AsideReason::kKeyTooLong)
               ? AsideReason::kNone
               : AsideReason::kKeyTooLong;
  }

  // What a value that has no encoding is answered with.
  AsideReason unreadable(AsideReason reason) noexcept {
    if (applies(reason)) return reason;
    key_.put_none();
    return AsideReason::kNone;
  }

  // A device that an argument names; without an index that is the thread's current one. Only the
  // one that the tensors are on is understood: the key's persistent form has no index, and what is
  // copied to another device is native's.
  void device(c10::Device device) noexcept {
    if (!is_cpu() && device.type() == device_type_ && !device.has_index()) {
      device = current_device(device_type_);
    }
    key_.put_device(static_cast<std::int64_t>(device.type()), device.index());
    named_device_ = device;
  }
  bool leaves_device() const noexcept {
    if (!named_device_) {
      return false;
    }
    return named_device_->type() != device_type_ ||
           (!is_cpu() && has_device_ && *named_device_ != call_.device);
  }

  // What makes a tensor of none is on the device that it is asked for.
  void settle_device() noexcept {
    if (!is_cpu() && !has_device_ && named_device_ && named_device_->type() == device_type_) {
      call_.device = *named_device_;
    }
  }

  void note_not_integral() noexcept { all_integral_ = false; }
  bool all_integral() const noexcept { return all_integral_; }
  Key& key() noexcept { return key_; }

 private:
  bool is_cpu() const noexcept { return kOnCpu || device_type_ == c10::DeviceType::CPU; }

  AsideReason kind_or_device(const c10::TensorImpl& impl) const noexcept {
    if (compat::has_names(impl)) {  // names come with a dispatch key of their own
      return AsideReason::kNamedTensor;
    }
    const c10::DispatchKeySet both = kAllowedOnCpu | kAllowedOnCuda;
    return (impl.key_set().raw_repr() & ~both.raw_repr()) == 0 ? AsideReason::kMixedDevices
                                                               : AsideReason::kTensorKind;
  }

  // A number in host memory beside CUDA tensors, as `x * 2` has one: native reads it and hands it
  // to its kernel by value, and so does ours. Its value is data, not part of the key.
  bool is_host_number(const c10::TensorImpl& impl) const noexcept {
    return !is_cpu() && impl.dim() == 0 &&
           (impl.key_set().raw_repr() & ~kAllowedOnCpu.raw_repr()) == 0 &&
           !c10::isComplexType(c10::typeMetaToScalarType(impl.dtype()));
  }

  AsideReason check_fields(const c10::TensorImpl& impl, c10::IntArrayRef sizes,
                           c10::ScalarType dtype, bool host_number) noexcept {
    if constexpr (kIsNew) {
      if (sizes.size() > std::numeric_limits<decltype(TensorTraits::dim)>::max()) [[unlikely]] {
        return AsideReason::kKeyTooLong;
      }
      const auto bit = static_cast<unsigned>(dtype);
      if ((bit >= 64 || ((kCommonDtypes >> bit) & 1) == 0) && applies(AsideReason::kDtype))
          [[unlikely]] {
        return AsideReason::kDtype;
      }
    }
    if (!is_cpu() && !host_number) {
      const c10::Device device = impl.device();
      if (has_device_ && device != call_.device && applies(AsideReason::kMixedDevices)) {
        return AsideReason::kMixedDevices;
      }
      call_.device = device;
      has_device_ = true;
    }
    if (kIsNew && impl.numel() == 0 && applies(AsideReason::kEmptyTensor)) [[unlikely]] {
      return AsideReason::kEmptyTensor;
    }
    return AsideReason::kNone;
  }

  static bool is_large(const c10::TensorImpl& impl, c10::IntArrayRef sizes,
                       c10::IntArrayRef strides) noexcept {
    std::int64_t extent = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      // Each factor is below 2^63 and a real tensor's extent fits its storage, but a 0-stride
      // dimension may be huge: saturate instead of overflowing.
      std::int64_t step = 0;
      if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &step) ||
          __builtin_add_overflow(extent, step, &extent)) {
        extent = std::numeric_limits<std::int64_t>::max();
        break;
      }
    }
    return extent > kMaxExtent || impl.numel() > kMaxExtent;
  }

  Key& key_;
  CallTensors& call_;
  const c10::DeviceType device_type_;
  const std::uint64_t disallowed_;
  bool all_integral_ = true;
  bool has_device_ = false;
  std::optional<c10::Device> named_device_;
};

// Reads a call of `count` arguments into an empty `key`; `put(index, walk)` encodes one of them.
template <typename Key, bool kOnCpu = false, typename Put>
AsideReason walk_call(const ArgumentPlan& plan, std::size_t count, c10::DeviceType device_type,
                      Key& key, CallTensors& call, Put put) noexcept {
  call.tensors.clear();
  call.device = c10::Device(device_type);
  GlobalState state = read_global_state();
  if (device_type != c10::DeviceType::CPU) {
    state.num_threads = 1;  // of the host, where nothing is computed
  }
  if (plan.reads_autocast) {
    read_autocast(device_type, state);
  }
  key.put_state(state);
  using ThisWalk = Walk<Key, kOnCpu>;
  ThisWalk walk(device_type, key, call);
  WrittenTensors written;
  const bool writes = !plan.written.empty();
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t first = call.tensors.size();
    if (const AsideReason reason = put(i, walk); reason != AsideReason::kNone) [[unlikely]] {
      return reason;
    }
    if (writes && plan.written[i] != 0) {
      written.add(first, call.tensors.size());
    }
  }
  if constexpr (!ThisWalk::kIsNew) {
    if (!key.matched()) {
      return AsideReason::kNone;
    }
  }
  walk.settle_device();
  if (ThisWalk::kIsNew && walk.leaves_device() && applies(AsideReason::kMixedDevices))
      [[unlikely]] {
    return AsideReason::kMixedDevices;
  }
  if (writes && written.overlap(call.tensors.view()) && applies(AsideReason::kOverlap))
      [[unlikely]] {
    return AsideReason::kOverlap;
  }
  if constexpr (ThisWalk::kIsNew) {
    if (plan.aside_if_integral && walk.all_integral() && applies(AsideReason::kIntegerDivision)) {
      return AsideReason::kIntegerDivision;
    }
    return key.overflowed() && applies(AsideReason::kKeyTooLong) ? AsideReason::kKeyTooLong
                                                                 : AsideReason::kNone;
  }
  return AsideReason::kNone;
}

}  // namespace eagercache
