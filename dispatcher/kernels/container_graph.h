#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dispatcher/device/cuda_graph.h"
#include "dispatcher/kernels/loaded_kernel.h"
#include "dispatcher/kernels/model_container.h"

namespace eagercache {

// The calls on one stream of one GPU that are replayed. Their graphs work in memory of one pool,
// one after the other, and what is in there means nothing between two calls: an answer is copied
// out of it. Any thread.
class GraphLane {
 public:
  GraphLane(c10::Device device, void* stream) : device_(device), stream_(stream) {}

  c10::Device device() const noexcept { return device_; }
  void* stream() const noexcept { return stream_; }
  // Its pool is about to be given back: no graph of it is launched any more.
  void close() {
    const std::scoped_lock lock(mutex_);
    closed_.store(true, std::memory_order_release);
  }
  bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }
  // Held from the first copy of a call's inputs to the last one of its outputs.
  std::mutex& mutex() noexcept { return mutex_; }

 private:
  const c10::Device device_;
  void* const stream_;
  std::mutex mutex_;
  std::atomic<bool> closed_{false};
};

// One call of a container as a CUDA graph: for calls whose tensors have the metadata of those that
// it was captured with. An input is read where it lay then, or copied to where the graph reads it.
// What the container writes of its inputs is not copied. Any thread.
class ContainerGraph {
 public:
  using Tensors = std::span<const at::Tensor* const>;

  // Captures a run of `model`, which has run before, on the current stream of the lane's device:
  // one for captures alone (make_capture_stream). What the thread allocates meanwhile must come
  // from the lane's pool. `copied`: whether an input's data are copied for each call. nullptr with
  // the reason when the run cannot be replayed; nothing has run on the device in either case.
  static std::unique_ptr<ContainerGraph> capture(ModelContainer& model, Tensors inputs,
                                                 const std::vector<bool>& copied,
                                                 std::shared_ptr<GraphLane> lane,
                                                 std::string* reason) noexcept;

  // Whether all inputs that are not copied lie where they lay. Takes no reference.
  bool reads(Tensors inputs) const noexcept;
  // The answer, in new tensors, on the lane's stream, which must be current. The caller holds
  // references to the inputs, for which reads() holds. kNotStarted when the driver refuses or the
  // lane is closed; kFailed when the graph was launched and its answer cannot be had.
  LoadedKernel::Outcome launch(Tensors inputs, std::span<at::Tensor> outputs) const noexcept;

  const GraphLane& lane() const noexcept { return *lane_; }
  std::size_t num_nodes() const noexcept { return graph_.num_nodes(); }

 private:
  struct Input {
    const void* address = nullptr;  // where the graph reads it
    std::size_t bytes = 0;          // of the copy; 0 where none is made
    bool copied = false;
  };
  struct Output {
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    std::vector<std::int64_t> sizes, strides;
    const void* address = nullptr;
    std::size_t bytes = 0;
  };

  explicit ContainerGraph(std::shared_ptr<GraphLane> lane) : lane_(std::move(lane)) {}
  bool captured(ModelContainer& model, Tensors inputs, const std::vector<bool>& copied,
                std::string* reason);
  bool note_outputs(std::span<const at::Tensor> outputs, std::span<const at::Tensor> read,
                    std::string* reason);

  const std::shared_ptr<GraphLane> lane_;
  std::vector<Input> inputs_;
  std::vector<Output> outputs_;
  CudaGraph graph_;
};

}  // namespace eagercache
