#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "dispatcher/kernels/loaded_kernel.h"
#include "dispatcher/plans/shape_plan.h"
#include "kernel_cache/base/status.h"
#include "kernel_cache/loading/shared_library.h"

namespace eagercache {

// A kernel that takes sizes as arguments: one answers the calls of a shape class that its guards
// admit.
class ShapeKernel : public LoadedKernel {
 public:
  enum class Admission : std::uint8_t {
    kRefused,  // no kernel for this call
    kNative,   // measured not to be faster for calls of this size
    kKernel,
  };

  // Whether run() answers the call with this key, whose class words equal those of
  // pattern().words. Any thread; allocates nothing.
  virtual Admission admits(std::span<const Word> words) const noexcept = 0;

  virtual const ShapePattern& pattern() const noexcept = 0;
};

// The values of the pattern's symbols in a call of these tensors. False where one has no such
// dimension.
inline bool read_symbols(const ShapePattern& pattern, std::span<const at::Tensor* const> inputs,
                         std::span<std::int64_t> symbols) noexcept {
  for (std::size_t i = 0; i < pattern.symbols.size(); ++i) {
    const ShapePattern::Symbol& symbol = pattern.symbols[i];
    const c10::IntArrayRef sizes = inputs[symbol.tensor]->sizes();
    if (symbol.dimension >= sizes.size()) {
      return false;
    }
    symbols[i] = sizes[symbol.dimension];
  }
  return true;
}

// Generated kernel functions on CPU. Like a BareKernel but for the sizes.
class CpuShapeKernel final : public ShapeKernel {
 public:
  // kIncompatible when the library lacks the plan's functions or the device is not a CPU.
  static Result<std::unique_ptr<CpuShapeKernel>> create(const SharedLibrary& library,
                                                        c10::Device device, ShapePlan plan);

  Admission admits(std::span<const Word> words) const noexcept override;
  const ShapePattern& pattern() const noexcept override { return plan_.pattern; }

  // kNotStarted for inputs that the guards do not admit; other than of a matching call they must
  // not be.
  Outcome run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
              c10::Device device) noexcept override;
  std::size_t num_inputs() const noexcept override { return plan_.num_inputs; }
  std::size_t num_outputs() const noexcept override { return plan_.outputs.size(); }

 private:
  using Entry = std::int32_t (*)(void* const* pointers, const std::int64_t* symbols);
  using Shape = std::int32_t (*)(const std::int64_t* symbols, std::int64_t* numbers);

  CpuShapeKernel(ShapePlan plan, Entry entry, Shape shape);
  Outcome launch(void** pointers, void** next, const std::int64_t* symbols,
                 std::span<const std::int64_t> scratch) const;

  const ShapePlan plan_;
  const Entry entry_;
  const Shape shape_;
};

}  // namespace eagercache
