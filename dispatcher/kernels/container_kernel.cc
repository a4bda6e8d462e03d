#include "dispatcher/kernels/container_kernel.h"

#include <algorithm>
#include <array>
#include <new>
#include <nlohmann/json.hpp>
#include <string>

#include "dispatcher/plans/plan_fields.h"
#include "guards/builder/key_builder.h"

namespace eagercache {
namespace {

constexpr std::size_t kMaxOutputs = 16;

// Whether a number from a manifest may be the stride of a dimension of size 1: nothing is addressed
// with it, but it is computed with.
bool is_stride(std::int64_t number) noexcept {
  return number >= 0 && static_cast<std::uint64_t>(number) <= kMaxPlanBytes;
}

}  // namespace

void adopt_strides(at::Tensor& tensor, const std::vector<std::int64_t>& wanted) {
  const at::IntArrayRef sizes = tensor.sizes();
  const at::IntArrayRef strides = tensor.strides();
  if (strides == at::IntArrayRef(wanted) || strides.size() != wanted.size()) {
    return;
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (strides[i] != wanted[i] && (sizes[i] != 1 || !is_stride(wanted[i]))) {
      return;
    }
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes.vec(), wanted);
}

Status ContainerKernel::set_output_strides(std::string_view text) {
  if (text.empty()) {
    return Status::ok();
  }
  const nlohmann::json all = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  std::vector<std::vector<std::int64_t>> strides;
  bool sound = all.is_array() && all.size() == num_outputs();
  for (std::size_t i = 0; sound && i < all.size(); ++i) {
    sound = all[i].is_array() && std::all_of(all[i].begin(), all[i].end(), [](const auto& value) {
              return value.is_number_integer();
            });
    if (sound) {
      strides.push_back(all[i].get<std::vector<std::int64_t>>());
    }
  }
  if (!sound) {
    return {StatusCode::kCorrupt, "the manifest's output strides are malformed"};
  }
  output_strides_ = std::move(strides);
  return Status::ok();
}

Result<std::unique_ptr<ContainerKernel>> ContainerKernel::create(const SharedLibrary& library,
                                                                 c10::Device device) {
  Result<std::unique_ptr<ModelContainer>> model =
      ModelContainer::open(library, device, {TensorArguments::kCapacity, kMaxOutputs, false});
  if (!model) {
    return model.status();
  }
  return std::unique_ptr<ContainerKernel>(new ContainerKernel(std::move(model).value()));
}

LoadedKernel::Outcome ContainerKernel::run(std::span<const at::Tensor* const> inputs,
                                           std::span<at::Tensor> outputs,
                                           c10::Device device) noexcept {
  const Outcome outcome = model_->lends(inputs.size()) ? model_->run_lent(inputs, outputs)
                                                       : run_with_handles(inputs, outputs, device);
  if (outcome == Outcome::kAnswered) {
    for (std::size_t i = 0; i < output_strides_.size() && i < outputs.size(); ++i) {
      adopt_strides(outputs[i], output_strides_[i]);
    }
  }
  return outcome;
}

LoadedKernel::Outcome ContainerKernel::run_with_handles(std::span<const at::Tensor* const> inputs,
                                                        std::span<at::Tensor> outputs,
                                                        c10::Device device) noexcept {
  if (inputs.size() > TensorArguments::kCapacity) {
    return Outcome::kFailed;
  }
  std::array<ModelContainer::TensorHandle, TensorArguments::kCapacity> handles;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    handles[i] = new (std::nothrow) at::Tensor(*inputs[i]);
    if (handles[i] == nullptr) {
      for (std::size_t made = 0; made < i; ++made) {
        delete static_cast<at::Tensor*>(handles[made]);
      }
      return Outcome::kNotStarted;
    }
  }
  return model_->run({handles.data(), inputs.size()}, outputs, device);
}

}  // namespace eagercache
