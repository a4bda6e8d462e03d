#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <span>

#include "guards/builder/unboxed_key.h"

namespace eagercache {

// A number that all calls of one key share and calls of other keys seldom do, at a fraction of what
// a key costs. It may only decide what is right either way: whether a call is worth a look.
//
// Made of dtypes, sizes and the first strides of tensors and of some numbers; of a list its length
// and its first tensor. 0, which no sketch is, for calls that most likely step aside: a tensor of
// an unusual kind. Any thread; allocates nothing, takes no lock, never throws.
std::uint64_t sketch_call(const UnboxedArguments& arguments, c10::DeviceType device_type) noexcept;
// A number that tells calls apart by their first tensor's dtype and sizes, in a few instructions:
// the upper bits as well as all of them. Never 0. Decides as little as a sketch does, and asks no
// tensor anything that a program may have made its own.
inline std::uint64_t mark_of_call(const UnboxedArguments& arguments) noexcept;

// The same call boxed may have another number.
std::uint64_t sketch_call(std::span<const c10::IValue> arguments,
                          c10::DeviceType device_type) noexcept;

inline std::uint64_t mark_of_call(const UnboxedArguments& arguments) noexcept {
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;  // digits of the golden ratio
  std::uint64_t mark = 1;
  c10::TensorImpl* impl = nullptr;
  if (arguments.kinds.empty()) {
    return mark;
  }
  if (arguments.kinds[0] == UnboxedKind::kTensor) [[likely]] {
    impl = arguments.at<at::Tensor>(0).unsafeGetTensorImpl();
  } else if (arguments.kinds[0] == UnboxedKind::kTensorList) {
    const auto& list = arguments.at<at::TensorList>(0);
    mark += list.size();
    impl = list.empty() ? nullptr : list[0].unsafeGetTensorImpl();
  } else if (arguments.kinds[0] == UnboxedKind::kTensorListRef) {
    const auto& list = arguments.at<at::ITensorListRef>(0);
    mark += list.size();
    impl = list.size() == 0 ? nullptr : list.front().unsafeGetTensorImpl();
  }
  if (impl != nullptr) {
    // The fields themselves; for a tensor with others in their place they mean nothing.
    const c10::impl::SizesAndStrides& fields = impl->sizes_and_strides();
    mark = mark * 64 + fields.size();
    if (fields.size() != 0) {
      mark = (mark * kOdd + static_cast<std::uint64_t>(fields.size_at_unchecked(0))) * kOdd +
             static_cast<std::uint64_t>(fields.size_at_unchecked(fields.size() - 1));
    }
    mark += static_cast<std::uint64_t>(c10::typeMetaToScalarType(impl->dtype())) << 32;
  }
  return mark * kOdd | 1;
}

}  // namespace eagercache
