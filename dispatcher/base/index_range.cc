#include "dispatcher/base/index_range.h"

namespace eagercache {

bool in_range(const at::Tensor& tensor, std::int64_t low, std::int64_t high,
              std::int64_t also) noexcept {
  if (!tensor.is_cpu()) {
    return true;
  }
  const auto inside = [&](const auto* data) {
    const std::int64_t count = tensor.numel();
    for (std::int64_t i = 0; i < count; ++i) {
      const auto value = static_cast<std::int64_t>(data[i]);
      if ((value < low || value >= high) && value != also) {
        return false;
      }
    }
    return true;
  };
  if (!tensor.is_contiguous()) {
    return false;
  }
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Long:
      return inside(tensor.const_data_ptr<std::int64_t>());
    case c10::ScalarType::Int:
      return inside(tensor.const_data_ptr<std::int32_t>());
    default:
      return false;
  }
}

}  // namespace eagercache
