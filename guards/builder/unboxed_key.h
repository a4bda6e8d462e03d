#pragma once

#include <ATen/core/ATen_fwd.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/Scalar.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include "guards/builder/key_builder.h"

namespace eagercache {

// How a C++ argument of an unboxed operator call is held. One per type that ATen's signatures have.
enum class UnboxedKind : std::uint8_t {
  kNone,  // a type that has no encoding: the signature gets no unboxed hook
  kTensor,
  kOptionalTensor,
  kTensorList,
  kTensorListRef,
  kInt,
  kOptionalInt,
  kSymInt,
  kOptionalSymInt,
  kFloat,
  kOptionalFloat,
  kBool,
  kOptionalBool,
  kScalar,
  kOptionalScalar,
  kIntList,
  kOptionalIntList,
  kSymIntList,
  kOptionalSymIntList,
  kOptionalFloatList,
  kBools2,
  kBools3,
  kBools4,
  kScalarList,
  kString,
  kOptionalString,
  kScalarType,
  kOptionalScalarType,
  kOptionalLayout,
  kMemoryFormat,
  kOptionalMemoryFormat,
  kOptionalDevice,
};

// The kind of an argument declared as `Argument` (references and const removed); kNone for others.
template <typename Argument>
constexpr UnboxedKind unboxed_kind() {
  using T = std::remove_cvref_t<Argument>;
  if constexpr (std::is_same_v<T, at::Tensor>)
    return UnboxedKind::kTensor;
  else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>)
    return UnboxedKind::kOptionalTensor;
  else if constexpr (std::is_same_v<T, at::TensorList>)
    return UnboxedKind::kTensorList;
  else if constexpr (std::is_same_v<T, at::ITensorListRef>)
    return UnboxedKind::kTensorListRef;
  else if constexpr (std::is_same_v<T, std::int64_t>)
    return UnboxedKind::kInt;
  else if constexpr (std::is_same_v<T, std::optional<std::int64_t>>)
    return UnboxedKind::kOptionalInt;
  else if constexpr (std::is_same_v<T, c10::SymInt>)
    return UnboxedKind::kSymInt;
  else if constexpr (std::is_same_v<T, std::optional<c10::SymInt>>)
    return UnboxedKind::kOptionalSymInt;
  else if constexpr (std::is_same_v<T, double>)
    return UnboxedKind::kFloat;
  else if constexpr (std::is_same_v<T, std::optional<double>>)
    return UnboxedKind::kOptionalFloat;
  else if constexpr (std::is_same_v<T, bool>)
    return UnboxedKind::kBool;
  else if constexpr (std::is_same_v<T, std::optional<bool>>)
    return UnboxedKind::kOptionalBool;
  else if constexpr (std::is_same_v<T, at::Scalar>)
    return UnboxedKind::kScalar;
  else if constexpr (std::is_same_v<T, std::optional<at::Scalar>>)
    return UnboxedKind::kOptionalScalar;
  else if constexpr (std::is_same_v<T, at::IntArrayRef>)
    return UnboxedKind::kIntList;
  else if constexpr (std::is_same_v<T, at::OptionalIntArrayRef>)
    return UnboxedKind::kOptionalIntList;
  else if constexpr (std::is_same_v<T, c10::SymIntArrayRef>)
    return UnboxedKind::kSymIntList;
  else if constexpr (std::is_same_v<T, at::OptionalSymIntArrayRef>)
    return UnboxedKind::kOptionalSymIntList;
  else if constexpr (std::is_same_v<T, std::optional<at::ArrayRef<double>>>)
    return UnboxedKind::kOptionalFloatList;
  else if constexpr (std::is_same_v<T, std::array<bool, 2>>)
    return UnboxedKind::kBools2;
  else if constexpr (std::is_same_v<T, std::array<bool, 3>>)
    return UnboxedKind::kBools3;
  else if constexpr (std::is_same_v<T, std::array<bool, 4>>)
    return UnboxedKind::kBools4;
  else if constexpr (std::is_same_v<T, at::ArrayRef<at::Scalar>>)
    return UnboxedKind::kScalarList;
  else if constexpr (std::is_same_v<T, std::string_view>)
    return UnboxedKind::kString;
  else if constexpr (std::is_same_v<T, std::optional<std::string_view>>)
    return UnboxedKind::kOptionalString;
  else if constexpr (std::is_same_v<T, at::ScalarType>)
    return UnboxedKind::kScalarType;
  else if constexpr (std::is_same_v<T, std::optional<at::ScalarType>>)
    return UnboxedKind::kOptionalScalarType;
  else if constexpr (std::is_same_v<T, std::optional<at::Layout>>)
    return UnboxedKind::kOptionalLayout;
  else if constexpr (std::is_same_v<T, at::MemoryFormat>)
    return UnboxedKind::kMemoryFormat;
  else if constexpr (std::is_same_v<T, std::optional<at::MemoryFormat>>)
    return UnboxedKind::kOptionalMemoryFormat;
  else if constexpr (std::is_same_v<T, std::optional<at::Device>>)
    return UnboxedKind::kOptionalDevice;
  else
    return UnboxedKind::kNone;
}

// The arguments of one unboxed call: where each lies, and what is there. Points to the caller's
// arguments; no ownership.
struct UnboxedArguments {
  std::span<const UnboxedKind> kinds;
  const void* const* values;  // as many as kinds

  template <typename T>
  const T& at(std::size_t index) const noexcept {
    return *static_cast<const T*>(values[index]);
  }
};

// Whether a C++ argument of that kind is what a schema's argument becomes that `reader` reads from
// a boxed stack.
bool fits(UnboxedKind kind, ArgumentReader reader) noexcept;

// As build_key of a boxed call, and with the same words for the same call.
AsideReason build_key(const ArgumentPlan& plan, const UnboxedArguments& arguments,
                      c10::DeviceType device_type, CallView& view) noexcept;

// Whether build_key would give the call these words, which it gave another call of the same
// operator. Writes no key and looks at nothing that follows from the words; fills `call` where
// true, and leaves it unspecified otherwise. Allocates nothing, takes no lock, never throws.
bool has_key(const ArgumentPlan& plan, const UnboxedArguments& arguments,
             c10::DeviceType device_type, std::span<const Word> words, CallTensors& call) noexcept;

}  // namespace eagercache
