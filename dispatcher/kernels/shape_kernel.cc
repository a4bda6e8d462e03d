#include "dispatcher/kernels/shape_kernel.h"

#include <array>
#include <utility>

#include "dispatcher/kernels/bare_kernel.h"
#include "dispatcher/memory/large_blocks.h"
#include "dispatcher/memory/output_allocation.h"

namespace eagercache {
namespace {

constexpr std::int64_t kBufferAlignment = 64;
// Scratch up to this size lies on the stack.
constexpr std::int64_t kLocalScratch = 2048;
constexpr std::int64_t kMaxScratch = std::int64_t{1} << 40;

}  // namespace

CpuShapeKernel::CpuShapeKernel(ShapePlan plan, Entry entry, Shape shape)
    : plan_(std::move(plan)), entry_(entry), shape_(shape) {}

Result<std::unique_ptr<CpuShapeKernel>> CpuShapeKernel::create(const SharedLibrary& library,
                                                               c10::Device device, ShapePlan plan) {
  if (!device.is_cpu()) {
    return Status(StatusCode::kIncompatible, "kernels with symbolic sizes run on CPU only");
  }
  const auto entry = reinterpret_cast<Entry>(library.symbol(plan.entry.c_str()));
  const auto shape = reinterpret_cast<Shape>(library.symbol(plan.shape.c_str()));
  if (entry == nullptr || shape == nullptr) {
    return Status(StatusCode::kIncompatible,
                  "the kernel's library has no " + (entry == nullptr ? plan.entry : plan.shape));
  }
  return std::unique_ptr<CpuShapeKernel>(new CpuShapeKernel(std::move(plan), entry, shape));
}

CpuShapeKernel::Admission CpuShapeKernel::admits(std::span<const Word> words) const noexcept {
  std::array<std::int64_t, ShapePattern::kMaxSymbols> symbols;  // uninitialised: see run()
  std::array<std::int64_t, ShapePlan::kMaxNumbers> numbers;
  if (!matches(plan_.pattern, words, symbols) || shape_(symbols.data(), numbers.data()) != 0) {
    return Admission::kRefused;
  }
  return plan_.chooses_kernel(numbers[plan_.count_numbers() - 1]) ? Admission::kKernel
                                                                  : Admission::kNative;
}

LoadedKernel::Outcome CpuShapeKernel::run(std::span<const at::Tensor* const> inputs,
                                          std::span<at::Tensor> outputs,
                                          c10::Device /*device*/) noexcept {
  if (inputs.size() != plan_.num_inputs || outputs.size() != plan_.outputs.size()) {
    return Outcome::kNotStarted;
  }
  try {
    // Uninitialised: on the path of a hit.
    std::array<std::int64_t, ShapePattern::kMaxSymbols> symbols;
    std::array<std::int64_t, ShapePlan::kMaxNumbers> numbers;
    std::array<void*, ShapePlan::kMaxPointers> pointers;
    if (!read_symbols(plan_.pattern, inputs, symbols)) {
      return Outcome::kFailed;
    }
    if (shape_(symbols.data(), numbers.data()) != 0) [[unlikely]] {
      return Outcome::kNotStarted;
    }
    void** next = pointers.data();
    for (const at::Tensor* input : inputs) {
      *next++ = const_cast<void*>(input->const_data_ptr());  // entries read them as const
    }
    const std::int64_t* number = numbers.data();
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const auto& [dtype, rank] = plan_.outputs[i];
      const c10::IntArrayRef sizes(number, rank);
      const c10::IntArrayRef strides(number + rank, rank);
      number += 2 * rank;
      outputs[i] = allocate_output(dtype, sizes, strides);
      *next++ = outputs[i].mutable_data_ptr();
    }
    return launch(pointers.data(), next, symbols.data(), {number, plan_.num_scratch});
  } catch (...) {
    return Outcome::kFailed;
  }
}

LoadedKernel::Outcome CpuShapeKernel::launch(void** pointers, void** next,
                                             const std::int64_t* symbols,
                                             std::span<const std::int64_t> scratch) const {
  std::int64_t bytes = 0;
  for (const std::int64_t size : scratch) {
    if (size < 0 || size > kMaxScratch) {
      return Outcome::kFailed;
    }
    bytes += (size + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment;
  }
  alignas(kBufferAlignment) std::array<std::byte, kLocalScratch> local;
  c10::DataPtr allocated;
  std::byte* buffer = local.data();
  if (bytes > kLocalScratch) {
    allocated = allocate_block(static_cast<std::size_t>(bytes));
    buffer = static_cast<std::byte*>(allocated.get());
  }
  for (const std::int64_t size : scratch) {
    *next++ = buffer;
    buffer += (size + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment;
  }
  return outcome_of_entry(entry_(pointers, symbols));
}

}  // namespace eagercache
