#include "dispatcher/kernels/bare_kernel.h"

#include <array>
#include <memory>
#include <string>

#include "dispatcher/memory/large_blocks.h"
#include "guards/builder/tensor_data.h"

namespace eagercache {
namespace {

constexpr std::size_t kScratchAlignment = 64;
// Scratch up to this size lies on the stack.
constexpr std::size_t kStackScratch = 2048;
// Calls with more tensors and scratch buffers than that allocate the array of their pointers.
constexpr std::size_t kInlinePointers = 112;

// In the place of the entry of a kernel that needs more than pointers.
std::int32_t not_without_scalars(void* const* /*pointers*/) { return 2; }

}  // namespace

BareKernel::BareKernel(LaunchPlan plan, Entry entry, ScalarEntry scalar_entry,
                       std::size_t num_scalars)
    : entry_(entry),
      scalar_entry_(scalar_entry),
      num_scalars_(num_scalars),
      num_inputs_(plan.num_inputs),
      writes_(std::move(plan.writes)) {
  for (LaunchPlan::Output& output : plan.outputs) {
    outputs_.emplace_back(output.dtype, std::move(output.sizes), std::move(output.strides));
  }
  for (const std::uint64_t bytes : plan.scratch) {
    scratch_offsets_.push_back(scratch_bytes_);
    scratch_bytes_ += (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
  }
}

Result<std::unique_ptr<BareKernel>> BareKernel::create(const SharedLibrary& library,
                                                       c10::Device device, LaunchPlan plan,
                                                       std::size_t num_scalars) {
  if (!device.is_cpu()) {
    return Status(StatusCode::kIncompatible, "bare kernels run on CPU only");
  }
  void* const symbol = library.symbol(plan.entry.c_str());
  if (symbol == nullptr) {
    return Status(StatusCode::kIncompatible, "the kernel's library has no " + plan.entry);
  }
  const bool plain = num_scalars == 0;
  return std::unique_ptr<BareKernel>(
      new BareKernel(std::move(plan), plain ? reinterpret_cast<Entry>(symbol) : not_without_scalars,
                     plain ? nullptr : reinterpret_cast<ScalarEntry>(symbol), num_scalars));
}

void** BareKernel::prepare(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
                           void** pointers) const {
  void** next = pointers;
  for (const at::Tensor* input : inputs) {
    // Entries read them as const.
    *next++ = const_cast<void*>(data_of(*input->unsafeGetTensorImpl()));
  }
  for (const std::size_t written : writes_) {
    pointers[written] = inputs[written]->mutable_data_ptr();
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    outputs[i] = outputs_[i].allocate();
    *next++ = const_cast<void*>(data_of(*outputs[i].unsafeGetTensorImpl()));
  }
  return next;
}

LoadedKernel::Outcome BareKernel::run(std::span<const at::Tensor* const> inputs,
                                      std::span<at::Tensor> outputs,
                                      c10::Device /*device*/) noexcept {
  return launch(inputs, outputs, entry_);
}

LoadedKernel::Outcome BareKernel::run_with(std::span<const at::Tensor* const> inputs,
                                           std::span<at::Tensor> outputs, c10::Device /*device*/,
                                           std::span<const double> scalars) noexcept {
  return launch(inputs, outputs,
                [&](void* const* pointers) { return scalar_entry_(pointers, scalars.data()); });
}

template <typename Call>
LoadedKernel::Outcome BareKernel::launch(std::span<const at::Tensor* const> inputs,
                                         std::span<at::Tensor> outputs, const Call& call) noexcept {
  if (inputs.size() != num_inputs_ || outputs.size() != outputs_.size()) {
    return Outcome::kNotStarted;
  }
  try {
    std::array<void*, kInlinePointers> inline_pointers;  // uninitialised: on the path of a hit
    std::unique_ptr<void*[]> many;                       // NOLINT(modernize-avoid-c-arrays)
    void** pointers = inline_pointers.data();
    if (const std::size_t count = inputs.size() + outputs.size() + scratch_offsets_.size();
        count > kInlinePointers) {
      many.reset(new void*[count]);
      pointers = many.get();
    }
    void** next = prepare(inputs, outputs, pointers);
    if (scratch_bytes_ == 0) [[likely]] {
      return outcome_of_entry(call(pointers));
    }
    alignas(kScratchAlignment) std::array<std::byte, kStackScratch> local;
    c10::DataPtr allocated;
    std::byte* scratch = local.data();
    if (scratch_bytes_ > kStackScratch) {
      allocated = allocate_block(scratch_bytes_);
      scratch = static_cast<std::byte*>(allocated.get());
    }
    for (const std::size_t offset : scratch_offsets_) {
      *next++ = scratch + offset;
    }
    return outcome_of_entry(call(pointers));
  } catch (...) {
    return Outcome::kNotStarted;  // entries do not throw; an allocation failed
  }
}

}  // namespace eagercache
