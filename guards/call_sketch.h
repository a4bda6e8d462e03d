#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <span>

#include "guards/unboxed_key.h"

namespace eagercache {

// A number that all calls of one key share and calls of other keys seldom do, at a fraction of what
// a key costs. It may only decide what is right either way: whether a call is worth a look.
//
// Made of dtypes, sizes and the first strides of tensors and of some numbers; of a list its length
// and its first tensor. 0, which no sketch is, for calls that most likely step aside: a tensor of
// an unusual kind. Any thread; allocates nothing, takes no lock, never throws.
std::uint64_t sketch_call(const UnboxedArguments& arguments, c10::DeviceType device_type) noexcept;
// The same call boxed may have another number.
std::uint64_t sketch_call(std::span<const c10::IValue> arguments,
                          c10::DeviceType device_type) noexcept;

}  // namespace eagercache
