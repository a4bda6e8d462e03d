#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "dispatcher/kernels/model_container.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// A container that all programs made of the same library share, and its first run, which is made
// alone. Never destroyed.
class SharedContainer {
 public:
  // kIncompatible when the library is no container.
  static Result<SharedContainer*> open(const std::filesystem::path& path);

  // Gives `outputs`, as many as the container has. A first run is waited for.
  LoadedKernel::Outcome run(std::span<const at::Tensor> inputs, std::span<at::Tensor> outputs);

  const ModelContainer& model() const noexcept { return *model_; }

 private:
  explicit SharedContainer(std::unique_ptr<ModelContainer> model) : model_(std::move(model)) {}

  std::unique_ptr<ModelContainer> model_;
  std::mutex first_run_mutex_;
  std::atomic<bool> ran_{false};
};

}  // namespace eagercache
