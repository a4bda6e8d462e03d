#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <string>

namespace eagercache {

// A kernel in this process, ready to answer calls of one key (or shape class) on one device. Never
// destroyed: guard tables and threads inside it hold plain pointers.
class LoadedKernel {
 public:
  enum class Outcome {
    kAnswered,    // outputs hold the answer
    kNotStarted,  // nothing ran (first run in progress on another thread); native may answer
    kFailed,      // the kernel reported an error; it wrote nothing but its own outputs
  };

  virtual ~LoadedKernel() = default;

  // Runs on the calling thread (on CUDA: on the current stream of `device`). `inputs` are the
  // call's tensors in argument order; `outputs` has room for exactly num_outputs() undefined
  // tensors, filled on kAnswered. Never throws, takes no lock except on a kernel's first run, needs
  // no GIL.
  virtual Outcome run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
                      c10::Device device) noexcept = 0;

  virtual std::size_t num_inputs() const noexcept = 0;
  virtual std::size_t num_outputs() const noexcept = 0;
};

}  // namespace eagercache
