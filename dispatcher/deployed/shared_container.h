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
  // One for each device. kIncompatible when the library is no container.
  static Result<SharedContainer*> open(const std::filesystem::path& path, c10::Device device);

  // Gives `outputs`, as many as the container has; on a GPU work for the thread's current stream.
  // A first run is waited for. kNotStarted, on a GPU, without memory or behind an earlier failure.
  LoadedKernel::Outcome run(std::span<const at::Tensor> inputs, std::span<at::Tensor> outputs);

  const ModelContainer& model() const noexcept { return *model_; }

 private:
  SharedContainer(std::unique_ptr<ModelContainer> model, c10::Device device)
      : model_(std::move(model)), device_(device) {}

  std::unique_ptr<ModelContainer> model_;
  const c10::Device device_;
  std::mutex first_run_mutex_;
  std::atomic<bool> ran_{false};
};

}  // namespace eagercache
