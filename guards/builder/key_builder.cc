#include "guards/builder/key_builder.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <xmmintrin.h>

#include <algorithm>
#include <bit>
#include <new>

#include "guards/builder/key_walk.h"

namespace eagercache {
namespace {

// Values as a boxed stack holds them.
class BoxedReader {
 public:
  explicit BoxedReader(Walk<KeyBuffer>& walk) noexcept : walk_(walk) {}

  AsideReason tensor_list(const c10::IValue& value) noexcept {
    if (!value.isList()) {
      return walk_.unreadable(AsideReason::kUnexpectedValue);
    }
    const c10::ArrayRef<c10::IValue> elements = value.toListRef();
    walk_.key().put_tensor_list(elements.size());
    for (const c10::IValue& element : elements) {
      if (element.isNone()) {
        walk_.key().put_none();
      } else if (element.isTensor()) {
        if (const AsideReason reason = walk_.tensor(element.toTensor());
            reason != AsideReason::kNone) {
          return reason;
        }
      } else if (applies(AsideReason::kUnexpectedValue)) {
        return AsideReason::kUnexpectedValue;
      }
    }
    return AsideReason::kNone;
  }

  AsideReason scalar(const c10::IValue& value) noexcept {
    if (value.isInt()) {
      walk_.key().put_int(value.toInt());
    } else if (value.isDouble()) {
      walk_.note_not_integral();
      walk_.key().put_float(value.toDouble());
    } else if (value.isBool()) {
      walk_.key().put_bool(value.toBool());
    } else if (value.isComplexDouble()) {
      walk_.note_not_integral();
      const c10::complex<double> number = value.toComplexDouble();
      walk_.key().put_complex(number.real(), number.imag());
    } else {
      return unreadable(value);
    }
    return AsideReason::kNone;
  }

  // Every list on the stack is one vector of IValues; reading it in place copies nothing.
  AsideReason list(ArgumentReader reader, const c10::IValue& value) noexcept {
    if (!value.isList()) {
      return walk_.unreadable(AsideReason::kUnexpectedValue);
    }
    const c10::ArrayRef<c10::IValue> elements = value.toListRef();
    switch (reader) {
      case ArgumentReader::kIntList:
        walk_.key().put_int_list_header(elements.size());
        return list_words(elements, &c10::IValue::isInt,
                          [](const c10::IValue& v) { return static_cast<Word>(v.toInt()); });
      case ArgumentReader::kFloatList:
        walk_.key().put_float_list_header(elements.size());
        return list_words(elements, &c10::IValue::isDouble,
                          [](const c10::IValue& v) { return std::bit_cast<Word>(v.toDouble()); });
      case ArgumentReader::kBoolList:
        walk_.key().put_bool_list_header(elements.size());
        return list_words(elements, &c10::IValue::isBool,
                          [](const c10::IValue& v) { return Word{v.toBool()}; });
      default:
        break;
    }
    walk_.key().put_scalar_list(elements.size());
    for (const c10::IValue& element : elements) {
      if (const AsideReason reason = scalar(element); reason != AsideReason::kNone) {
        return reason;
      }
    }
    return AsideReason::kNone;
  }

 private:
  template <typename Read>
  AsideReason list_words(c10::ArrayRef<c10::IValue> elements, bool (c10::IValue::*has_tag)() const,
                         Read read) noexcept {
    for (const c10::IValue& element : elements) {
      if (!(element.*has_tag)()) [[unlikely]] {
        return unreadable(element);
      }
      walk_.key().put_word(read(element));
    }
    return AsideReason::kNone;
  }

  AsideReason unreadable(const c10::IValue& value) noexcept {
    return walk_.unreadable(value.isSymInt() || value.isSymFloat() || value.isSymBool()
                                ? AsideReason::kSymbolic
                                : AsideReason::kUnexpectedValue);
  }

  Walk<KeyBuffer>& walk_;
};

AsideReason put_argument(ArgumentReader reader, const c10::IValue& value,
                         Walk<KeyBuffer>& walk) noexcept {
  KeyBuffer& key = walk.key();
  BoxedReader boxed(walk);
  if (value.isNone()) {
    key.put_none();
    return AsideReason::kNone;
  }
  switch (reader) {
    case ArgumentReader::kTensor:
      return value.isTensor() ? walk.tensor(value.toTensor())
                              : walk.unreadable(AsideReason::kUnexpectedValue);
    case ArgumentReader::kTensorList:
      return boxed.tensor_list(value);
    case ArgumentReader::kInt:
    case ArgumentReader::kFloat:
    case ArgumentReader::kBool:
    case ArgumentReader::kScalar:
      return boxed.scalar(value);
    case ArgumentReader::kString:
      if (!value.isString()) {
        return walk.unreadable(AsideReason::kUnexpectedValue);
      }
      key.put_string(value.toStringRef());
      return AsideReason::kNone;
    case ArgumentReader::kIntList:
    case ArgumentReader::kFloatList:
    case ArgumentReader::kBoolList:
    case ArgumentReader::kScalarList:
      return boxed.list(reader, value);
    case ArgumentReader::kDevice: {
      if (!value.isDevice()) {
        return walk.unreadable(AsideReason::kUnexpectedValue);
      }
      walk.device(value.toDevice());
      return AsideReason::kNone;
    }
    case ArgumentReader::kScalarType:
    case ArgumentReader::kLayout:
    case ArgumentReader::kMemoryFormat:
      if (!value.isInt()) {
        return walk.unreadable(AsideReason::kUnexpectedValue);
      }
      if (reader == ArgumentReader::kScalarType) {
        key.put_scalar_type(value.toInt());
      } else if (reader == ArgumentReader::kLayout) {
        key.put_layout(value.toInt());
      } else {
        key.put_memory_format(value.toInt());
      }
      return AsideReason::kNone;
  }
  return AsideReason::kUnexpectedValue;
}

}  // namespace

bool TensorArguments::grow() noexcept {
  if (room_ == kCapacity) {
    return false;
  }
  many_.reset(new (std::nothrow) const at::Tensor*[kCapacity]);
  if (!many_) {
    return false;
  }
  std::copy_n(inline_, size_, many_.get());
  slots_ = many_.get();
  room_ = kCapacity;
  return true;
}

AsideReason build_key(const ArgumentPlan& plan, std::span<const c10::IValue> arguments,
                      c10::DeviceType device_type, CallView& view) noexcept {
  view.key.clear();
  return walk_call(plan, arguments.size(), device_type, view.key, view,
                   [&](std::size_t i, Walk<KeyBuffer>& walk) noexcept {
                     return put_argument(plan.readers[i], arguments[i], walk);
                   });
}

c10::Device current_device(c10::DeviceType type) noexcept {
  try {
    if (c10::impl::hasDeviceGuardImpl(type)) {
      return c10::impl::VirtualGuardImpl(type).getDevice();
    }
  } catch (...) {  // no driver: native says so
  }
  return c10::Device(type);
}

GlobalState read_global_state() noexcept {
  const at::Context& context = at::globalContext();
  GlobalState state;
  state.default_dtype = static_cast<std::uint8_t>(c10::get_default_dtype_as_scalartype());
  state.deterministic = context.deterministicAlgorithms();
  state.deterministic_warn_only = context.deterministicAlgorithmsWarnOnly();
  state.fill_uninitialized_memory = context.deterministicFillUninitializedMemory();
  state.num_threads = static_cast<std::uint16_t>(at::get_num_threads());
  return state;
}

void read_autocast(c10::DeviceType device_type, GlobalState& state) noexcept {
  state.autocast = at::autocast::is_autocast_enabled(device_type);
  state.autocast_dtype =
      state.autocast ? static_cast<std::uint8_t>(at::autocast::get_autocast_dtype(device_type))
                     : std::uint8_t{0};
}

bool floating_point_mode_is_default() noexcept {
  // Bits 6 (denormals are zero), 13-14 (rounding) and 15 (flush to zero) of MXCSR change results.
  constexpr unsigned kResultBits = 0x40U | 0x6000U | 0x8000U;
  return (_mm_getcsr() & kResultBits) == 0;
}

}  // namespace eagercache
