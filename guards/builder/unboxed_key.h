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

// The types of arguments, in the order of UnboxedKind.
template <typename... Types>
struct UnboxedTypes {
  static constexpr std::size_t kCount = sizeof...(Types);

  // The place of T, or 0, which no type has.
  template <typename T>
  static constexpr std::size_t place_of() {
    std::size_t place = 0;
    std::size_t found = 0;
    ((++place, found = std::is_same_v<T, Types> ? place : found), ...);
    return found;
  }
};
using UnboxedKinds =
    UnboxedTypes<at::Tensor, std::optional<at::Tensor>, at::TensorList, at::ITensorListRef,
                 std::int64_t, std::optional<std::int64_t>, c10::SymInt, std::optional<c10::SymInt>,
                 double, std::optional<double>, bool, std::optional<bool>, at::Scalar,
                 std::optional<at::Scalar>, at::IntArrayRef, at::OptionalIntArrayRef,
                 c10::SymIntArrayRef, at::OptionalSymIntArrayRef,
                 std::optional<at::ArrayRef<double>>, std::array<bool, 2>, std::array<bool, 3>,
                 std::array<bool, 4>, at::ArrayRef<at::Scalar>, std::string_view,
                 std::optional<std::string_view>, at::ScalarType, std::optional<at::ScalarType>,
                 std::optional<at::Layout>, at::MemoryFormat, std::optional<at::MemoryFormat>,
                 std::optional<at::Device>>;
static_assert(UnboxedKinds::kCount == static_cast<std::size_t>(UnboxedKind::kOptionalDevice));

// The kind of an argument declared as `Argument` (references and const removed); kNone for others.
template <typename Argument>
constexpr UnboxedKind unboxed_kind() {
  return static_cast<UnboxedKind>(UnboxedKinds::place_of<std::remove_cvref_t<Argument>>());
}
static_assert(unboxed_kind<const c10::SymInt&>() == UnboxedKind::kSymInt);
static_assert(unboxed_kind<at::OptionalIntArrayRef>() == UnboxedKind::kOptionalIntList);
static_assert(unboxed_kind<std::string_view>() == UnboxedKind::kString);
static_assert(unboxed_kind<std::optional<at::Device>>() == UnboxedKind::kOptionalDevice);
static_assert(unboxed_kind<float>() == UnboxedKind::kNone);

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
