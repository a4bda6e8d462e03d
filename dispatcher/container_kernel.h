#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

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

  // The strides that native gives its outputs, as JSON ("[[4,1],[]]"); empty text for "as the
  // kernel gives them". Where an output of the kernel differs from them in dimensions of size 1
  // only, which address nothing, it gets native's. Call before the first run. kCorrupt for a
  // malformed text.
  Status set_output_strides(std::string_view text);
  void set_output_strides(std::vector<std::vector<std::int64_t>> strides) {
    output_strides_ = std::move(strides);
  }

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
  std::vector<std::vector<std::int64_t>> output_strides_;  // empty, or one per output
  // The first run folds constants and may set up lazily; it is made alone. Others that arrive
  // meanwhile do not wait: native answers them.
  std::atomic<bool> ran_once_{false};
  std::mutex first_run_mutex_;
};

}  // namespace eagercache
