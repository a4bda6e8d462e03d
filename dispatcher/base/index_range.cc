#include "dispatcher/base/index_range.h"

namespace eagercache {

namespace {

struct Range {
  std::int64_t low, high, also;

  bool has(std::int64_t value) const noexcept {
    return (value >= low && value < high) || value == also;
  }
};

// Of any strides, as a slice has them; the last dimension is the innermost loop.
template <typename Number>
bool inside(const Number* data, c10::IntArrayRef sizes, c10::IntArrayRef strides,
            const Range& range) noexcept {
  if (sizes.empty()) {
    return range.has(static_cast<std::int64_t>(*data));
  }
  for (std::int64_t i = 0; i < sizes[0]; ++i) {
    const Number* const next = data + i * strides[0];
    const bool holds = sizes.size() == 1 ? range.has(static_cast<std::int64_t>(*next))
                                         : inside(next, sizes.slice(1), strides.slice(1), range);
    if (!holds) {
      return false;
    }
  }
  return true;
}

template <typename Number>
bool all_inside(const at::Tensor& tensor, const Range& range) noexcept {
  const auto* data = tensor.const_data_ptr<Number>();
  if (!tensor.is_contiguous()) {
    return inside(data, tensor.sizes(), tensor.strides(), range);
  }
  const std::int64_t count = tensor.numel();
  for (std::int64_t i = 0; i < count; ++i) {
    if (!range.has(static_cast<std::int64_t>(data[i]))) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool in_range(const at::Tensor& tensor, std::int64_t low, std::int64_t high,
              std::int64_t also) noexcept {
  if (!tensor.is_cpu()) {
    return true;
  }
  const Range range{low, high, also};
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Long:
      return all_inside<std::int64_t>(tensor, range);
    case c10::ScalarType::Int:
      return all_inside<std::int32_t>(tensor, range);
    default:
      return false;
  }
}

}  // namespace eagercache
