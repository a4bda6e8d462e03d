#include "dispatcher/observe/rehearsal.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace eagercache {
namespace {

// All copies together, so that they stay in a core's own cache as the originals would.
constexpr std::size_t kBytes = 1 << 18;
constexpr std::size_t kMaxCopies = 64;

std::size_t bytes_of(const c10::IValue& value) {
  if (value.isTensorList()) {
    std::size_t bytes = 0;
    for (const c10::IValue& element : value.toListRef()) {
      bytes += bytes_of(element);
    }
    return bytes;
  }
  return value.isTensor() && value.toTensor().defined() ? value.toTensor().nbytes() : 0;
}

at::Tensor like(const at::Tensor& original) {
  std::int64_t end = original.storage_offset() + 1;
  for (std::int64_t i = 0; i < original.dim(); ++i) {
    end += (original.size(i) - 1) * original.stride(i);
  }
  return at::empty({end}, original.options())
      .as_strided(original.sizes(), original.strides(), original.storage_offset());
}

}  // namespace

Rehearsal::Rehearsal(const torch::jit::Stack& arguments, const std::vector<std::uint8_t>& written)
    : period_(std::numeric_limits<std::size_t>::max()) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < written.size(); ++i) {
    bytes += written[i] != 0 ? bytes_of(arguments[i]) : 0;
  }
  if (bytes == 0) {
    stacks_.push_back(arguments);
    return;
  }
  period_ = std::clamp<std::size_t>(kBytes / bytes, 1, kMaxCopies);
  for (std::size_t n = 0; n < period_; ++n) {
    torch::jit::Stack& stack = stacks_.emplace_back(arguments);
    for (std::size_t i = 0; i < written.size(); ++i) {
      if (written[i] != 0) {
        stack[i] = copy(arguments[i]);
      }
    }
  }
}

c10::IValue Rehearsal::copy(const c10::IValue& value) {
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& element : value.toTensorVector()) {
      list.push_back(copy(element).toTensor());
    }
    return list;
  }
  if (!value.isTensor() || !value.toTensor().defined()) {
    return value;
  }
  at::Tensor made = like(value.toTensor());
  copies_.emplace_back(made, value.toTensor());
  return made;
}

void Rehearsal::reset() {
  for (auto& [made, original] : copies_) {
    made.copy_(original);
  }
}

}  // namespace eagercache
