#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "dispatcher/loaded_kernel.h"
#include "kernel_cache/shared_library.h"
#include "kernel_cache/status.h"

namespace eagercache {

// A whole AOTInductor model container, driven through the C ABI that its shared object exports
// (torch/csrc/inductor/aoti_runtime/interface.h), by the single-threaded entry point: no pool, no
// event, no wait. A container of one kernel keeps no state between runs once its first run is over.
class ContainerKernel final : public LoadedKernel {
 public:
  // `device` tells where it runs ("cpu", "cuda:0"). kIncompatible when the library lacks the ABI,
  // when it has constants, or when its container cannot be made. Creates no CUDA context for CPU.
  static Result<std::unique_ptr<ContainerKernel>> create(const SharedLibrary& library,
                                                         c10::Device device);

  Outcome run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
              c10::Device device) noexcept override;
  std::size_t num_inputs() const noexcept override { return num_inputs_; }
  std::size_t num_outputs() const noexcept override { return num_outputs_; }

 private:
  // Opaque handles of the C ABI. AOTIRuntimeError is an int32_t; 0 is success.
  using Container = void*;
  using TensorHandle = void*;
  using RunFunction = std::int32_t (*)(Container, TensorHandle*, std::size_t, TensorHandle*,
                                       std::size_t, void* stream, void* proxy_executor);

  ContainerKernel() = default;
  Outcome run_now(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
                  c10::Device device) noexcept;

  Container container_ = nullptr;  // never deleted
  RunFunction run_ = nullptr;
  std::size_t num_inputs_ = 0;
  std::size_t num_outputs_ = 0;
  // The first run folds constants and may set up lazily; it is made alone. Others that arrive
  // meanwhile do not wait: native answers them.
  std::atomic<bool> ran_once_{false};
  std::mutex first_run_mutex_;
};

}  // namespace eagercache
