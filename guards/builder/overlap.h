#pragma once

// Calls whose written tensors share memory with others have no kernel. An object lives on the stack
// of one call.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <span>

namespace eagercache {

// The tensors that one call may write, among all of its tensors, and whether writing them in any
// order gives what native gives. Generated code takes each argument for memory of its own: it may
// read one after it has written another.
class WrittenTensors {
 public:
  // Arguments of a call that are written, each one tensor or a list. An operator has one for each
  // of its outputs at most.
  static constexpr std::size_t kMaxArguments = 8;

  WrittenTensors() noexcept {}  // ranges_ stays uninitialised: it is on the path of every call

  // The tensors from `first` to before `last`, after those that were added before.
  void add(std::size_t first, std::size_t last) noexcept {
    if (count_ == kMaxArguments) {
      overfull_ = true;
      return;
    }
    ranges_[count_++] = {first, last};
  }

  // Whether a written tensor has two elements in one place, or may share memory with another one of
  // `tensors`. What lies between a tensor's first and last byte counts as its memory, so
  // interleaved tensors do too. Also true when it cannot tell, for want of memory or with too many
  // written arguments. None of the tensors is empty. O(n log n).
  bool overlap(std::span<const at::Tensor* const> tensors) const noexcept;

 private:
  struct Range {
    std::size_t first;
    std::size_t last;
  };
  bool is_written(std::size_t tensor) const noexcept;

  std::array<Range, kMaxArguments> ranges_;
  std::size_t count_ = 0;
  bool overfull_ = false;
};

}  // namespace eagercache
