#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "dispatcher/kernels/profile_event.h"

namespace eagercache {

// A kernel in this process, ready to answer calls of one key (or shape class) on one device. Never
// destroyed: guard tables and threads inside it hold plain pointers.
class LoadedKernel {
 public:
  enum class Outcome {
    kAnswered,    // outputs hold the answer
    kNotStarted,  // nothing was written (first run in progress, no memory); native may answer
    kFailed,      // the kernel reported an error; it may have written its inputs, if it ever does
  };

  virtual ~LoadedKernel() = default;

  // As run(), and an event of its own for a profiler that listens (profile_event.h).
  Outcome answer(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
                 c10::Device device) noexcept {
    if (somebody_may_listen()) [[unlikely]] {
      return answer_in_profile(inputs, outputs, device);
    }
    return watched([&] { return run(inputs, outputs, device); });
  }
  // Names the kernel's events after its entry in the store. Before the kernel is given to other
  // threads, once; a kernel without a name has no events.
  void name_events(const std::string& entry);
  // `watcher` learns of the beginning and the end of every run up to the first one that answers;
  // it must not throw.
  // Before the kernel is given to other threads.
  void watch_first_run(std::function<void(bool begins)> watcher) {
    watcher_ = std::move(watcher);
    watched_.store(true, std::memory_order_relaxed);
  }

  // Runs on the calling thread (on CUDA: on the current stream of `device`). `inputs` are the
  // call's tensors in argument order; `outputs` has room for exactly num_outputs() undefined
  // tensors, filled on kAnswered. Never throws, takes no lock except on a kernel's first run, needs
  // no GIL.
  virtual Outcome run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
                      c10::Device device) noexcept = 0;

  virtual std::size_t num_inputs() const noexcept = 0;
  virtual std::size_t num_outputs() const noexcept = 0;
  // Whether it writes some of its inputs. After kFailed native must then not run for the same call.
  virtual bool writes_inputs() const noexcept { return false; }

 protected:
  // What `run` returns, after the watcher learnt of its beginning and end where there is one.
  template <typename Run>
  Outcome watched(const Run& run) noexcept {
    if (!watched_.load(std::memory_order_relaxed)) [[likely]] {
      return run();
    }
    watcher_(true);
    const Outcome outcome = run();
    watcher_(false);
    if (outcome == Outcome::kAnswered) {
      watched_.store(false, std::memory_order_relaxed);
    }
    return outcome;
  }

  // As `kernel` is named, which outlives this one.
  void name_events_as(const LoadedKernel& kernel) noexcept { event_ = kernel.event_; }

 private:
  Outcome answer_in_profile(std::span<const at::Tensor* const> inputs,
                            std::span<at::Tensor> outputs, c10::Device device) noexcept;

  const char* event_ = nullptr;  // never freed, as kernels are
  std::atomic<bool> watched_{false};
  std::function<void(bool begins)> watcher_;
};

// A kernel that may take numbers of the call as arguments (guards/key/scalar_class.h). One that
// takes any answers calls WithScalars only: its run() never starts.
class ScalarKernel : public LoadedKernel {
 public:
  virtual std::size_t num_scalars() const noexcept = 0;  // 0 for a kernel of one call

  class WithScalars;

 private:
  // As run(), with num_scalars() numbers.
  virtual Outcome run_with(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
                           c10::Device device, std::span<const double> scalars) noexcept = 0;
};

// A kernel together with the numbers of one call, both of which outlive it: made on the stack.
class ScalarKernel::WithScalars final : public LoadedKernel {
 public:
  WithScalars(ScalarKernel& kernel, std::span<const double> scalars)
      : kernel_(kernel), scalars_(scalars) {
    name_events_as(kernel);
  }

  Outcome run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
              c10::Device device) noexcept override {
    if (scalars_.empty() || scalars_.size() != kernel_.num_scalars()) {
      return Outcome::kNotStarted;
    }
    return kernel_.watched([&] { return kernel_.run_with(inputs, outputs, device, scalars_); });
  }
  std::size_t num_inputs() const noexcept override { return kernel_.num_inputs(); }
  std::size_t num_outputs() const noexcept override { return kernel_.num_outputs(); }
  bool writes_inputs() const noexcept override { return kernel_.writes_inputs(); }

 private:
  ScalarKernel& kernel_;
  const std::span<const double> scalars_;
};

}  // namespace eagercache
