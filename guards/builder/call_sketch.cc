#include "guards/builder/call_sketch.h"

#include <c10/core/TensorImpl.h>

#include <bit>

#include "guards/builder/key_walk.h"

namespace eagercache {
namespace {

class Sketch {
 public:
  explicit Sketch(c10::DeviceType device_type) noexcept
      : disallowed_(~allowed_on(device_type).raw_repr()) {}

  void add(std::uint64_t value) noexcept {
    constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;  // digits of the golden ratio
    sum_ = (std::rotl(sum_, 5) ^ value) * kOdd;
  }

  [[gnu::always_inline]] void tensor(const at::Tensor& tensor) noexcept {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if ((impl->key_set().raw_repr() & disallowed_) != 0) [[unlikely]] {
      // What is asked of the others below may be a program's own there.
      unusual_ = unusual_ || tensor.defined();
      add(1);
      return;
    }
    const c10::IntArrayRef sizes = impl->sizes();
    add(static_cast<std::uint64_t>(c10::typeMetaToScalarType(impl->dtype())) << 8 | sizes.size());
    for (const std::int64_t size : sizes) {
      add(static_cast<std::uint64_t>(size));
    }
    if (!sizes.empty()) {
      add(static_cast<std::uint64_t>(impl->strides().front()));
    }
  }

  template <typename Tensors>
  void tensors(const Tensors& tensors) noexcept {
    add(tensors.size());
    for (const at::Tensor& first : tensors) {
      tensor(first);
      return;
    }
  }

  void scalar(const at::Scalar& value) noexcept {
    if (value.isFloatingPoint()) {
      add(std::bit_cast<std::uint64_t>(value.toDouble()));
    } else if (value.type() == at::ScalarType::Long && !value.isSymbolic()) {
      add(static_cast<std::uint64_t>(value.toLong()));
    }
  }

  void integers(at::IntArrayRef values) noexcept {
    for (const std::int64_t value : values) {
      add(static_cast<std::uint64_t>(value));
    }
  }

  std::uint64_t value() const noexcept { return unusual_ ? 0 : sum_ | 1; }

 private:
  static c10::DispatchKeySet allowed_on(c10::DeviceType device_type) noexcept {
    return device_type == c10::DeviceType::CPU ? kAllowedOnCpu : kAllowedOnCuda | kAllowedOnCpu;
  }

  const std::uint64_t disallowed_;
  std::uint64_t sum_ = 0x243f6a8885a308d3;
  bool unusual_ = false;
};

[[gnu::always_inline]] inline void add_argument(Sketch& sketch, const UnboxedArguments& arguments,
                                                std::size_t i) noexcept {
  switch (arguments.kinds[i]) {
    case UnboxedKind::kTensor:
      return sketch.tensor(arguments.at<at::Tensor>(i));
    case UnboxedKind::kOptionalTensor:
      if (const auto& tensor = arguments.at<std::optional<at::Tensor>>(i)) {
        sketch.tensor(*tensor);
      }
      return;
    case UnboxedKind::kTensorList:
      return sketch.tensors(arguments.at<at::TensorList>(i));
    case UnboxedKind::kTensorListRef:
      return sketch.tensors(arguments.at<at::ITensorListRef>(i));
    case UnboxedKind::kInt:
      return sketch.add(static_cast<std::uint64_t>(arguments.at<std::int64_t>(i)));
    case UnboxedKind::kBool:
      return sketch.add(std::uint64_t{arguments.at<bool>(i)});
    case UnboxedKind::kFloat:
      return sketch.add(std::bit_cast<std::uint64_t>(arguments.at<double>(i)));
    case UnboxedKind::kScalar:
      return sketch.scalar(arguments.at<at::Scalar>(i));
    case UnboxedKind::kIntList:
      return sketch.integers(arguments.at<at::IntArrayRef>(i));
    case UnboxedKind::kOptionalIntList:
      if (const auto& values = arguments.at<at::OptionalIntArrayRef>(i)) {
        sketch.integers(*values);
      }
      return;
    default:
      return;
  }
}

void add_argument(Sketch& sketch, const c10::IValue& value) noexcept {
  if (value.isTensor()) {
    sketch.tensor(value.toTensor());
  } else if (value.isInt()) {
    sketch.add(static_cast<std::uint64_t>(value.toInt()));
  } else if (value.isDouble()) {
    sketch.add(std::bit_cast<std::uint64_t>(value.toDouble()));
  } else if (value.isBool()) {
    sketch.add(std::uint64_t{value.toBool()});
  } else if (value.isList()) {
    const c10::ArrayRef<c10::IValue> elements = value.toListRef();
    sketch.add(elements.size());
    const bool tensors = !elements.empty() && elements.front().isTensor();
    for (const c10::IValue& element : tensors ? elements.slice(0, 1) : elements) {
      if (element.isTensor()) {
        sketch.tensor(element.toTensor());
      } else if (element.isInt()) {
        sketch.add(static_cast<std::uint64_t>(element.toInt()));
      }
    }
  }
}

}  // namespace

std::uint64_t sketch_call(const UnboxedArguments& arguments, c10::DeviceType device_type) noexcept {
  Sketch sketch(device_type);
  for (std::size_t i = 0; i < arguments.kinds.size(); ++i) {
    add_argument(sketch, arguments, i);
  }
  return sketch.value();
}

std::uint64_t sketch_call(std::span<const c10::IValue> arguments,
                          c10::DeviceType device_type) noexcept {
  Sketch sketch(device_type);
  for (const c10::IValue& argument : arguments) {
    add_argument(sketch, argument);
  }
  return sketch.value();
}

}  // namespace eagercache
