#include "dispatcher/deployed/shared_container.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>

#include <map>
#include <string>
#include <utility>

#include "dispatcher/hook/inside_guard.h"

namespace eagercache {
namespace {

// More than any model has.
constexpr std::size_t kMaxProgramInputs = std::size_t{1} << 16;
constexpr std::size_t kMaxProgramOutputs = std::size_t{1} << 10;

}  // namespace

Result<SharedContainer*> SharedContainer::open(const std::filesystem::path& path,
                                               c10::Device device) {
  static auto* const mutex = new std::mutex();
  static auto* const known = new std::map<std::pair<std::string, std::string>, SharedContainer*>();
  const std::pair<std::string, std::string> name(path.native(), device.str());
  const std::scoped_lock lock(*mutex);
  if (const auto found = known->find(name); found != known->end()) {
    return found->second;
  }
  const Result<SharedLibrary> library = SharedLibrary::open(path);
  if (!library) {
    return library.status();
  }
  Result<std::unique_ptr<ModelContainer>> model =
      ModelContainer::open(library.value(), device, {kMaxProgramInputs, kMaxProgramOutputs, true});
  if (!model) {
    return model.status();
  }
  return known->emplace(name, new SharedContainer(std::move(model).value(), device)).first->second;
}

LoadedKernel::Outcome SharedContainer::run(std::span<const at::Tensor> inputs,
                                           std::span<at::Tensor> outputs) {
  const InsideGuard inside;
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  c10::SmallVector<ModelContainer::TensorHandle, 64> handles;
  for (const at::Tensor& input : inputs) {
    handles.push_back(new at::Tensor(input));
  }
  const std::span<ModelContainer::TensorHandle> given(handles.data(), handles.size());
  if (ran_.load(std::memory_order_acquire)) [[likely]] {
    return model_->run(given, outputs, device_);
  }
  const std::scoped_lock lock(first_run_mutex_);
  const LoadedKernel::Outcome outcome = model_->run(given, outputs, device_);
  if (outcome == LoadedKernel::Outcome::kAnswered) {
    ran_.store(true, std::memory_order_release);
  }
  return outcome;
}

}  // namespace eagercache
