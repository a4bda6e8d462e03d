#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace eagercache {

// One call, to be made many times: where it writes arguments, on copies of them, so that every run
// finds the same values and the caller's tensors stay as they are. Not thread-safe.
class Rehearsal {
 public:
  // `written` has a flag for each of `arguments`, or is empty when none is written. Copies have the
  // sizes, strides and alignment of the originals, which must lie in allocations of torch's.
  Rehearsal(const torch::jit::Stack& arguments, const std::vector<std::uint8_t>& written);

  // Calls between two resets; any number when nothing is written.
  std::size_t period() const noexcept { return period_; }
  // The arguments of call number `call`.
  const torch::jit::Stack& arguments(std::size_t call) const noexcept {
    return stacks_[call % stacks_.size()];
  }
  // Gives all copies the originals' values.
  void reset();

 private:
  c10::IValue copy(const c10::IValue& value);

  std::vector<torch::jit::Stack> stacks_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // each with its original
  std::size_t period_;
};

}  // namespace eagercache
