#include "guards/builder/unboxed_key.h"

#include <c10/core/Scalar.h>
#include <c10/core/SymIntArrayRef.h>

#include <array>

#include "guards/builder/key_walk.h"

namespace eagercache {
namespace {

template <typename Key, bool kOnCpu>
AsideReason put_scalar(const at::Scalar& value, Walk<Key, kOnCpu>& walk) noexcept {
  auto& key = walk.key();
  if (value.isSymbolic()) {
    return walk.unreadable(AsideReason::kSymbolic);
  }
  if (value.isBoolean()) {
    key.put_bool(value.toBool());
  } else if (value.type() == at::ScalarType::Long) {
    key.put_int(value.toLong());
  } else if (value.isFloatingPoint()) {
    walk.note_not_integral();
    key.put_float(value.toDouble());
  } else if (value.isComplex()) {
    walk.note_not_integral();
    const c10::complex<double> number = value.toComplexDouble();
    key.put_complex(number.real(), number.imag());
  } else {
    return walk.unreadable(AsideReason::kUnexpectedValue);  // past the range of int64
  }
  return AsideReason::kNone;
}

template <typename Key, bool kOnCpu>
AsideReason put_sym_int(const c10::SymInt& value, Walk<Key, kOnCpu>& walk) noexcept {
  if (value.is_heap_allocated()) {
    return walk.unreadable(AsideReason::kSymbolic);
  }
  walk.key().put_int(value.as_int_unchecked());
  return AsideReason::kNone;
}

template <typename Key, bool kOnCpu>
AsideReason put_sym_ints(c10::SymIntArrayRef values, Walk<Key, kOnCpu>& walk) noexcept {
  auto& key = walk.key();
  key.put_int_list_header(values.size());
  for (const c10::SymInt& value : values) {
    if (value.is_heap_allocated()) {
      return walk.unreadable(AsideReason::kSymbolic);
    }
    key.put_word(static_cast<Word>(value.as_int_unchecked()));
  }
  return AsideReason::kNone;
}

template <std::size_t kCount, typename Key>
void put_bools(const std::array<bool, kCount>& values, Key& key) noexcept {
  key.put_bool_list_header(kCount);
  for (const bool value : values) {
    key.put_word(Word{value});
  }
}

template <typename Tensors, typename Key, bool kOnCpu>
AsideReason put_tensors(const Tensors& tensors, Walk<Key, kOnCpu>& walk) noexcept {
  walk.key().put_tensor_list(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (const AsideReason reason = walk.tensor(tensor); reason != AsideReason::kNone) {
      return reason;
    }
  }
  return AsideReason::kNone;
}

// Encodes the value of an optional with `put`, or None.
template <typename T, typename Key, typename Put>
AsideReason put_optional(const UnboxedArguments& arguments, std::size_t i, Key& key,
                         Put put) noexcept {
  const auto& value = arguments.at<T>(i);
  if (!value.has_value()) {
    key.put_none();
    return AsideReason::kNone;
  }
  if constexpr (std::is_void_v<decltype(put(*value))>) {
    put(*value);
    return AsideReason::kNone;
  } else {
    return put(*value);
  }
}

template <typename Key>
void put_ints(at::IntArrayRef values, Key& key) noexcept {
  key.put_int_list(values.data(), values.size());
}

template <typename Key, bool kOnCpu>
AsideReason put_number(const UnboxedArguments& arguments, std::size_t i,
                       Walk<Key, kOnCpu>& walk) noexcept {
  auto& key = walk.key();
  const auto put_float = [&](double value) noexcept {
    walk.note_not_integral();
    key.put_float(value);
  };
  switch (arguments.kinds[i]) {
    case UnboxedKind::kInt:
      key.put_int(arguments.at<std::int64_t>(i));
      return AsideReason::kNone;
    case UnboxedKind::kOptionalInt:
      return put_optional<std::optional<std::int64_t>>(
          arguments, i, key, [&](std::int64_t value) noexcept { key.put_int(value); });
    case UnboxedKind::kSymInt:
      return put_sym_int(arguments.at<c10::SymInt>(i), walk);
    case UnboxedKind::kOptionalSymInt:
      return put_optional<std::optional<c10::SymInt>>(
          arguments, i, key,
          [&](const c10::SymInt& value) noexcept { return put_sym_int(value, walk); });
    case UnboxedKind::kFloat:
      put_float(arguments.at<double>(i));
      return AsideReason::kNone;
    case UnboxedKind::kOptionalFloat:
      return put_optional<std::optional<double>>(arguments, i, key, put_float);
    case UnboxedKind::kBool:
      key.put_bool(arguments.at<bool>(i));
      return AsideReason::kNone;
    case UnboxedKind::kOptionalBool:
      return put_optional<std::optional<bool>>(arguments, i, key,
                                               [&](bool value) noexcept { key.put_bool(value); });
    case UnboxedKind::kOptionalScalar:
      return put_optional<std::optional<at::Scalar>>(
          arguments, i, key,
          [&](const at::Scalar& value) noexcept { return put_scalar(value, walk); });
    default:
      return put_scalar(arguments.at<at::Scalar>(i), walk);
  }
}

template <typename Key, bool kOnCpu>
AsideReason put_list(const UnboxedArguments& arguments, std::size_t i,
                     Walk<Key, kOnCpu>& walk) noexcept {
  auto& key = walk.key();
  switch (arguments.kinds[i]) {
    case UnboxedKind::kTensorList:
      return put_tensors(arguments.at<at::TensorList>(i), walk);
    case UnboxedKind::kTensorListRef:
      return put_tensors(arguments.at<at::ITensorListRef>(i), walk);
    case UnboxedKind::kIntList:
      put_ints(arguments.at<at::IntArrayRef>(i), key);
      return AsideReason::kNone;
    case UnboxedKind::kOptionalIntList:
      return put_optional<at::OptionalIntArrayRef>(
          arguments, i, key, [&](at::IntArrayRef values) noexcept { put_ints(values, key); });
    case UnboxedKind::kSymIntList:
      return put_sym_ints(arguments.at<c10::SymIntArrayRef>(i), walk);
    case UnboxedKind::kOptionalSymIntList:
      return put_optional<at::OptionalSymIntArrayRef>(
          arguments, i, key,
          [&](c10::SymIntArrayRef values) noexcept { return put_sym_ints(values, walk); });
    case UnboxedKind::kOptionalFloatList:
      return put_optional<std::optional<at::ArrayRef<double>>>(
          arguments, i, key, [&](at::ArrayRef<double> values) noexcept {
            key.put_float_list(values.data(), values.size());
          });
    case UnboxedKind::kBools2:
      put_bools(arguments.at<std::array<bool, 2>>(i), key);
      return AsideReason::kNone;
    case UnboxedKind::kBools3:
      put_bools(arguments.at<std::array<bool, 3>>(i), key);
      return AsideReason::kNone;
    case UnboxedKind::kBools4:
      put_bools(arguments.at<std::array<bool, 4>>(i), key);
      return AsideReason::kNone;
    default:
      break;
  }
  const auto& scalars = arguments.at<at::ArrayRef<at::Scalar>>(i);
  key.put_scalar_list(scalars.size());
  for (const at::Scalar& scalar : scalars) {
    if (const AsideReason reason = put_scalar(scalar, walk); reason != AsideReason::kNone) {
      return reason;
    }
  }
  return AsideReason::kNone;
}

template <typename Key, bool kOnCpu>
AsideReason put_option(const UnboxedArguments& arguments, std::size_t i,
                       Walk<Key, kOnCpu>& walk) noexcept {
  auto& key = walk.key();
  const auto put_type = [&](at::ScalarType type) noexcept {
    key.put_scalar_type(static_cast<std::int64_t>(type));
  };
  const auto put_format = [&](at::MemoryFormat format) noexcept {
    key.put_memory_format(static_cast<std::int64_t>(format));
  };
  const auto put_string = [&](std::string_view text) noexcept { key.put_string(text); };
  switch (arguments.kinds[i]) {
    case UnboxedKind::kString:
      put_string(arguments.at<std::string_view>(i));
      return AsideReason::kNone;
    case UnboxedKind::kOptionalString:
      return put_optional<std::optional<std::string_view>>(arguments, i, key, put_string);
    case UnboxedKind::kScalarType:
      put_type(arguments.at<at::ScalarType>(i));
      return AsideReason::kNone;
    case UnboxedKind::kOptionalScalarType:
      return put_optional<std::optional<at::ScalarType>>(arguments, i, key, put_type);
    case UnboxedKind::kOptionalLayout:
      return put_optional<std::optional<at::Layout>>(
          arguments, i, key,
          [&](at::Layout layout) noexcept { key.put_layout(static_cast<std::int64_t>(layout)); });
    case UnboxedKind::kMemoryFormat:
      put_format(arguments.at<at::MemoryFormat>(i));
      return AsideReason::kNone;
    case UnboxedKind::kOptionalMemoryFormat:
      return put_optional<std::optional<at::MemoryFormat>>(arguments, i, key, put_format);
    case UnboxedKind::kOptionalDevice:
      return put_optional<std::optional<at::Device>>(
          arguments, i, key, [&](at::Device device) noexcept { walk.device(device); });
    default:
      return AsideReason::kUnexpectedValue;
  }
}

template <typename Key, bool kOnCpu>
AsideReason put_argument(const UnboxedArguments& arguments, std::size_t i,
                         Walk<Key, kOnCpu>& walk) noexcept {
  const UnboxedKind kind = arguments.kinds[i];
  if (kind == UnboxedKind::kTensor) [[likely]] {
    return walk.tensor(arguments.at<at::Tensor>(i));
  }
  if (kind == UnboxedKind::kOptionalTensor) {
    return put_optional<std::optional<at::Tensor>>(
        arguments, i, walk.key(),
        [&](const at::Tensor& tensor) noexcept { return walk.tensor(tensor); });
  }
  if (kind >= UnboxedKind::kInt && kind <= UnboxedKind::kOptionalScalar) {
    return put_number(arguments, i, walk);
  }
  return kind >= UnboxedKind::kString ? put_option(arguments, i, walk)
                                      : put_list(arguments, i, walk);
}

}  // namespace

bool fits(UnboxedKind kind, ArgumentReader reader) noexcept {
  switch (kind) {
    case UnboxedKind::kTensor:
    case UnboxedKind::kOptionalTensor:
      return reader == ArgumentReader::kTensor;
    case UnboxedKind::kTensorList:
    case UnboxedKind::kTensorListRef:
      return reader == ArgumentReader::kTensorList;
    case UnboxedKind::kInt:
    case UnboxedKind::kOptionalInt:
    case UnboxedKind::kSymInt:
    case UnboxedKind::kOptionalSymInt:
      return reader == ArgumentReader::kInt;
    case UnboxedKind::kFloat:
    case UnboxedKind::kOptionalFloat:
      return reader == ArgumentReader::kFloat;
    case UnboxedKind::kBool:
    case UnboxedKind::kOptionalBool:
      return reader == ArgumentReader::kBool;
    case UnboxedKind::kScalar:
    case UnboxedKind::kOptionalScalar:
      return reader == ArgumentReader::kScalar;
    case UnboxedKind::kIntList:
    case UnboxedKind::kOptionalIntList:
    case UnboxedKind::kSymIntList:
    case UnboxedKind::kOptionalSymIntList:
      return reader == ArgumentReader::kIntList;
    case UnboxedKind::kOptionalFloatList:
      return reader == ArgumentReader::kFloatList;
    case UnboxedKind::kBools2:
    case UnboxedKind::kBools3:
    case UnboxedKind::kBools4:
      return reader == ArgumentReader::kBoolList;
    case UnboxedKind::kScalarList:
      return reader == ArgumentReader::kScalarList;
    case UnboxedKind::kString:
    case UnboxedKind::kOptionalString:
      return reader == ArgumentReader::kString;
    case UnboxedKind::kScalarType:
    case UnboxedKind::kOptionalScalarType:
      return reader == ArgumentReader::kScalarType;
    case UnboxedKind::kOptionalLayout:
      return reader == ArgumentReader::kLayout;
    case UnboxedKind::kMemoryFormat:
    case UnboxedKind::kOptionalMemoryFormat:
      return reader == ArgumentReader::kMemoryFormat;
    case UnboxedKind::kOptionalDevice:
      return reader == ArgumentReader::kDevice;
    case UnboxedKind::kNone:
      return false;
  }
  return false;
}

AsideReason build_key(const ArgumentPlan& plan, const UnboxedArguments& arguments,
                      c10::DeviceType device_type, CallView& view) noexcept {
  view.key.clear();
  return walk_call(plan, arguments.kinds.size(), device_type, view.key, view,
                   [&](std::size_t i, Walk<KeyBuffer>& walk) noexcept {
                     return put_argument(arguments, i, walk);
                   });
}

bool has_key(const ArgumentPlan& plan, const UnboxedArguments& arguments,
             c10::DeviceType device_type, std::span<const Word> words, CallTensors& call) noexcept {
  KeyMatcher key(words);
  const auto read = [&](auto is_cpu) noexcept {
    constexpr bool kOnCpu = decltype(is_cpu)::value;
    return walk_call<KeyMatcher, kOnCpu>(
        plan, arguments.kinds.size(), device_type, key, call,
        [&](std::size_t i, auto& walk) noexcept { return put_argument(arguments, i, walk); });
  };
  const AsideReason reason =
      device_type == c10::DeviceType::CPU ? read(std::true_type()) : read(std::false_type());
  return reason == AsideReason::kNone && key.matched();
}

}  // namespace eagercache
