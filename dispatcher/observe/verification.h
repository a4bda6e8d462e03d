#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <string>

namespace eagercache {

// Live checks of kernels, asked for by the user: a share of all hits is computed by native too.

// The share, from 0 (off, the default) to 1. Hooks ask then (call_observer.h). Thread-safe.
void set_verification_share(double share) noexcept;

// Whether this call is to be checked. One relaxed load when off.
bool verification_chosen() noexcept;

// Empty when a kernel's tensor agrees with native's; otherwise what differs, in a few words.
// Metadata, integers, NaN and infinities must be equal; floating-point values may differ by 1024
// units (half precision: 16) in the last place of the largest number in the tensor, since a proved
// kernel need not round as native does. May throw what ATen throws.
std::string difference_from_native(const at::Tensor& kernel, const at::Tensor& native);

// Compares the last `count` values of two stacks, all tensors: the kernel's answers and native's.
// One by one, as above.
std::string difference_from_native(const torch::jit::Stack& kernel, const torch::jit::Stack& native,
                                   std::size_t count);

}  // namespace eagercache
