#pragma once

// The check of an index tensor before code runs that does not check it itself. Any thread; nobody
// may write the tensor meanwhile.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace eagercache {

// Whether every element of a tensor of 32- or 64-bit integers, of any strides, is in [low, high),
// or `also`; false for other tensors. One on a GPU is not looked at: there compiled code traps on
// the device, as eager does.
bool in_range(const at::Tensor& tensor, std::int64_t low, std::int64_t high,
              std::int64_t also) noexcept;
inline bool in_range(const at::Tensor& tensor, std::int64_t low, std::int64_t high) noexcept {
  return in_range(tensor, low, high, low);
}

}  // namespace eagercache
