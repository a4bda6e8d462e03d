#include "dispatcher/hook/integer_samples.h"

#include <algorithm>
#include <exception>

namespace eagercache {
namespace {

bool has_integers(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.layout() != c10::kStrided || tensor.numel() == 0 ||
      tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return false;
  }
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
      return true;
    default:
      return false;
  }
}

// Elements from the tensor's first one to its element `number` in row-major order.
std::int64_t offset_of(const at::Tensor& tensor, std::int64_t number) {
  std::int64_t offset = 0;
  for (std::int64_t d = tensor.dim() - 1; d >= 0; --d) {
    offset += number % tensor.size(d) * tensor.stride(d);
    number /= tensor.size(d);
  }
  return offset;
}

template <typename T>
void read(const at::Tensor& tensor, std::size_t count, std::vector<std::int64_t>& values) {
  const auto* const data = static_cast<const T*>(tensor.const_data_ptr());
  const auto all = static_cast<std::size_t>(tensor.numel());
  values.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    // The first and the last are among them.
    const std::size_t number = count < 2 ? 0 : i * (all - 1) / (count - 1);
    values.push_back(data[offset_of(tensor, static_cast<std::int64_t>(number))]);
  }
}

void read_as(const at::Tensor& tensor, std::size_t count, std::vector<std::int64_t>& values) {
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Byte:
      return read<std::uint8_t>(tensor, count, values);
    case c10::ScalarType::Char:
      return read<std::int8_t>(tensor, count, values);
    case c10::ScalarType::Short:
      return read<std::int16_t>(tensor, count, values);
    case c10::ScalarType::Int:
      return read<std::int32_t>(tensor, count, values);
    default:
      return read<std::int64_t>(tensor, count, values);
  }
}

}  // namespace

std::vector<IntegerSample> sample_integers(std::span<const at::Tensor* const> tensors) noexcept {
  try {
    std::vector<IntegerSample> samples;
    std::size_t left = kMostIntegers;
    for (std::size_t i = 0; i < tensors.size() && samples.size() < kMostIntegerTensors; ++i) {
      const at::Tensor& tensor = *tensors[i];
      if (!has_integers(tensor)) {
        continue;
      }
      const auto all = static_cast<std::size_t>(tensor.numel());
      IntegerSample sample{i, all <= left, {}};
      const std::size_t count = sample.whole ? all : std::min({all, left, kSampledIntegers});
      if (count == 0) {
        break;
      }
      read_as(tensor, count, sample.values);
      left -= count;
      samples.push_back(std::move(sample));
    }
    return samples;
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace eagercache
