#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dispatcher/kernels/container_frame.h"
#include "dispatcher/kernels/loaded_kernel.h"
#include "dispatcher/plans/operator_calls.h"
#include "kernel_cache/base/status.h"
#include "kernel_cache/loading/shared_library.h"

namespace eagercache {

// A whole AOTInductor model container, driven through the C ABI that its shared object exports
// (torch/csrc/inductor/aoti_runtime/interface.h), by the single-threaded entry point: no pool, no
// event, no wait. What is compiled for us keeps no state between runs once its first run is over,
// so that any number of threads may run it at a time. Never destroyed.
class ModelContainer {
 public:
  struct Limits {
    std::size_t inputs = 0;
    std::size_t outputs = 0;
    bool constants = false;  // whether the container may hold constants
  };

  // An AtenTensorHandle of the C ABI: an at::Tensor* made by `new`.
  using TensorHandle = void*;

  // `device` tells where it runs ("cpu", "cuda:0"). kIncompatible when the library lacks the ABI,
  // is over the limits, or when its container cannot be made. Creates no CUDA context for CPU. The
  // thread's current CUDA device stays what it is; must not be called under a capture of this
  // thread, and does not disturb those of others.
  static Result<std::unique_ptr<ModelContainer>> open(const SharedLibrary& library,
                                                      c10::Device device, const Limits& limits);

  // Runs on the calling thread (on CUDA: on the current stream of `device`). Takes the handles of
  // `inputs` and what they point to, whatever the outcome; gives `outputs`, which has room for
  // exactly num_outputs() undefined tensors. A first run, which loads the GPU's code, is
  // kNotStarted when it meets another one or a graph capture of its stream; later ones may be
  // captured. So is a run on CUDA that ends for want of memory, or because earlier work has broken
  // the device, and one in which an operator of the program's raises (OperatorCalls::take_raised).
  // Never throws; needs no GIL.
  LoadedKernel::Outcome run(std::span<TensorHandle> inputs, std::span<at::Tensor> outputs,
                            c10::Device device) noexcept;

  // Whether run_lent() may be called: the container comes to ContainerFrame, and has run once.
  bool lends(std::size_t num_inputs) const noexcept {
    return lends_ && num_inputs <= ContainerFrame::kMostInputs &&
           ran_once_.load(std::memory_order_acquire);
  }
  // As run(), on CPU, where the inputs stay the caller's: makes no handle on the heap.
  LoadedKernel::Outcome run_lent(std::span<const at::Tensor* const> inputs,
                                 std::span<at::Tensor> outputs) noexcept;

  // `watcher` learns of the beginning and the end of every run up to the first one that answers; it
  // must not throw. Before the container is given to other threads.
  void watch_first_run(std::function<void(bool begins)> watcher) { watcher_ = std::move(watcher); }

  // Whether it calls operators of the program's own, which may do anything besides.
  bool calls_operators() const noexcept { return operators_ != nullptr; }

  // The address of a function that the library has beside the C ABI, or nullptr.
  void* symbol(const char* name) const noexcept { return library_->symbol(name); }

  // What Inductor calls the inputs in its text ("arg0_1"), in order; nothing where the library does
  // not tell. For people: asks the library each time.
  std::vector<std::string> input_names() const;

  std::size_t num_inputs() const noexcept { return num_inputs_; }
  std::size_t num_outputs() const noexcept { return num_outputs_; }

 private:
  // AOTIRuntimeError is an int32_t; 0 is success.
  using RunFunction = std::int32_t (*)(void* container, TensorHandle*, std::size_t, TensorHandle*,
                                       std::size_t, void* stream, void* proxy_executor);

  ModelContainer() = default;
  LoadedKernel::Outcome run_first(std::span<TensorHandle> inputs, std::span<at::Tensor> outputs,
                                  c10::Device device) noexcept;
  LoadedKernel::Outcome run_now(std::span<TensorHandle> inputs, std::span<at::Tensor> outputs,
                                c10::Device device,
                                std::vector<ContainerFrame::Made>* noted) noexcept;

  std::optional<SharedLibrary> library_;  // set by open()
  void* container_ = nullptr;
  RunFunction run_ = nullptr;
  std::size_t num_inputs_ = 0;
  std::size_t num_outputs_ = 0;
  bool lends_ = false;
  // What the first run that answered made; guarded by first_run_mutex_, constant once ran_once_.
  std::vector<ContainerFrame::Made> made_;
  // The first run folds constants and loads what runs on a GPU; it is made alone. Others that
  // arrive meanwhile do not wait: native answers them.
  std::atomic<bool> ran_once_{false};
  std::mutex first_run_mutex_;
  std::function<void(bool begins)> watcher_;  // may be empty
  std::unique_ptr<OperatorCalls> operators_;  // nullptr: it calls none
};

}  // namespace eagercache
