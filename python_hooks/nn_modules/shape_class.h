#pragma once

// Which forms of call of a module share one kernel with symbolic sizes. A record owns its classes;
// the kernel is never destroyed.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "python_hooks/nn_modules/arguments.h"

namespace eagercache {

struct ModuleKernel;

// Forms of call that one kernel answers: they differ in some sizes of tensors, which are at least
// 2, in the strides that follow from those, and in some integers that objects hold; each tensor is
// dense in one order of its dimensions, or always has the same sizes and strides. Immutable; needs
// the GIL only where the kernel does.
class ModuleShapeClass {
 public:
  enum class Answer {
    kForeign,  // another class, or a size that the kernel does not hold for
    kKernel,
    kNative,  // the forward is faster for about so many elements
  };
  using Strides = std::vector<std::vector<std::int64_t>>;
  // How the tensors of one call are laid out.
  struct Layout {
    Strides strides;  // of the outputs
    // Of a kernel for training: what `with_sizes` takes (training_plan.h).
    std::vector<std::int64_t> numbers;
  };

  // (elements of the largest tensor with an open size, whether the kernel was faster), ascending.
  using Choice = std::vector<std::pair<std::int64_t, bool>>;
  static constexpr std::int64_t kOpen = -1;

  // `words`: one form of the class, but for the values of sizes that are not open: those are in
  // `sizes`, a row for each tensor and count, kOpen where open. That of a tensor that is given
  // again is not looked at. Throws std::invalid_argument when that does not fit together.
  ModuleShapeClass(std::span<const Word> words, const std::vector<std::vector<std::int64_t>>& sizes,
                   ModuleKernel* kernel, Choice choice);

  ModuleKernel* kernel() const noexcept { return kernel_; }
  // Below 1 us. On kKernel fills `layout`.
  Answer admits(std::span<const Word> words, Layout& layout) const;

 private:
  struct Sized {
    SizedPlace place;
    std::vector<std::int64_t> sizes;       // kOpen where open; the value of a count
    std::vector<std::uint32_t> innermost;  // dimensions, the one with the smallest stride first
    std::vector<Word> strides;             // of a tensor that is not dense
  };

  bool is_laid_out(const Sized& sized, std::span<const Word> words,
                   std::int64_t* elements) const noexcept;
  bool is_chosen(std::int64_t elements) const noexcept;

  std::vector<Word> words_;
  std::vector<Sized> sized_;
  std::size_t num_open_ = 0;
  std::size_t num_numbers_ = 0;  // that the kernel's function gives
  ModuleKernel* kernel_;
  Choice choice_;
};

// Dimensions in the order of their strides, the smallest first: those that a dense tensor has.
// Empty when the strides are not those of one (or the rank is 0).
std::vector<std::uint32_t> dense_order(std::span<const Word> sizes, std::span<const Word> strides);

}  // namespace eagercache
