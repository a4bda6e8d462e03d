#include "dispatcher/kernels/container_graph.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/device/device_stream.h"

namespace eagercache {
namespace {

constexpr c10::DispatchKeySet kGraphKeys(c10::DispatchKey::CUDA);
// What copies and the launch of a graph cost is about three launches.
constexpr std::size_t kFewestNodes = 3;

at::Tensor allocate(c10::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::Tensor(at::detail::empty_strided_generic(
      sizes, strides, c10::GetAllocator(c10::DeviceType::CUDA), kGraphKeys, dtype));
}

// From the first element to behind the last one, of any strides: gaps between them are the
// storage's.
std::size_t bytes_spanned(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return 0;
  }
  std::size_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    last += static_cast<std::size_t>((tensor.size(i) - 1) * tensor.stride(i));
  }
  return (last + 1) * tensor.itemsize();
}

unsigned long long pointer(const void* address) noexcept {
  return reinterpret_cast<std::uintptr_t>(address);
}

}  // namespace

std::unique_ptr<ContainerGraph> ContainerGraph::capture(ModelContainer& model, Tensors inputs,
                                                        const std::vector<bool>& copied,
                                                        std::shared_ptr<GraphLane> lane,
                                                        std::string* reason) noexcept {
  try {
    std::unique_ptr<ContainerGraph> made(new ContainerGraph(std::move(lane)));
    return made->captured(model, inputs, copied, reason) ? std::move(made) : nullptr;
  } catch (const std::exception& error) {
    *reason = std::string("it cannot be captured: ") + error.what();
  } catch (...) {
    *reason = "it cannot be captured";
  }
  return nullptr;
}

bool ContainerGraph::captured(ModelContainer& model, Tensors inputs,
                              const std::vector<bool>& copied, std::string* reason) {
  void* stream = nullptr;
  if (inputs.size() != model.num_inputs() || !current_stream(lane_->device(), &stream)) {
    *reason = "its inputs are others";
    return false;
  }
  std::vector<at::Tensor> read;
  std::optional<RelaxedCapture> relaxed(std::in_place);  // another thread may be capturing
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& given = *inputs[i];
    if (given.device() != lane_->device()) {
      *reason = "it reads a number that lies in the host's memory";
      return false;
    }
    read.push_back(copied[i] ? allocate(given.scalar_type(), given.sizes(), given.strides())
                             : given);
    inputs_.push_back({read[i].const_data_ptr(), copied[i] ? bytes_spanned(given) : 0, copied[i]});
  }
  relaxed.reset();
  std::vector<ModelContainer::TensorHandle> handles;
  for (const at::Tensor& tensor : read) {
    handles.push_back(new at::Tensor(tensor));
  }
  std::vector<at::Tensor> outputs(model.num_outputs());
  GraphCapture capture(stream);
  if (!capture.begin()) {
    for (ModelContainer::TensorHandle handle : handles) {
      delete static_cast<at::Tensor*>(handle);
    }
    *reason = "its stream cannot be captured";
    return false;
  }
  const LoadedKernel::Outcome outcome = model.run(handles, outputs, lane_->device());
  graph_ = capture.end(reason);
  if (outcome != LoadedKernel::Outcome::kAnswered && graph_.valid()) {
    graph_ = CudaGraph();
    *reason = "the kernel does not run under a capture";
  }
  if (graph_.valid() && graph_.num_nodes() < kFewestNodes) {
    graph_ = CudaGraph();
    *reason = "it has fewer than three launches";
  }
  return graph_.valid() && note_outputs(outputs, read, reason);
}

bool ContainerGraph::note_outputs(std::span<const at::Tensor> outputs,
                                  std::span<const at::Tensor> read, std::string* reason) {
  std::vector<const void*> storages;
  for (const at::Tensor& tensor : read) {
    storages.push_back(tensor.storage().data());
  }
  for (const at::Tensor& output : outputs) {
    if (output.device() != lane_->device()) {
      *reason = "it answers with a tensor in the host's memory";
      return false;
    }
    if (output.storage_offset() != 0) {
      *reason = "an output is a part of a larger tensor";
      return false;
    }
    const void* const storage = output.storage().data();
    const std::size_t bytes = bytes_spanned(output);
    if (bytes != 0 && std::ranges::find(storages, storage) != storages.end()) {
      *reason = "an output shares memory with another one or an input";
      return false;
    }
    storages.push_back(storage);
    outputs_.push_back({output.scalar_type(), output.sizes().vec(), output.strides().vec(),
                        output.const_data_ptr(), bytes});
  }
  return true;
}

bool ContainerGraph::reads(Tensors inputs) const noexcept {
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (!inputs_[i].copied && inputs[i]->const_data_ptr() != inputs_[i].address) {
      return false;
    }
  }
  return inputs.size() == inputs_.size();
}

LoadedKernel::Outcome ContainerGraph::launch(Tensors inputs,
                                             std::span<at::Tensor> outputs) const noexcept {
  using Outcome = LoadedKernel::Outcome;
  const GraphDriver& driver = *GraphDriver::get();
  void* const stream = lane_->stream();
  try {
    const c10::DeviceGuard guard(lane_->device());
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      outputs[i] = allocate(outputs_[i].dtype, outputs_[i].sizes, outputs_[i].strides);
    }
    const std::scoped_lock lock(lane_->mutex());
    if (lane_->closed()) {
      return Outcome::kNotStarted;
    }
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (inputs_[i].bytes != 0 &&
          driver.memcpy_device_async(pointer(inputs_[i].address),
                                     pointer(inputs[i]->const_data_ptr()), inputs_[i].bytes,
                                     stream) != CudaDriver::kSuccess) {
        return Outcome::kNotStarted;
      }
    }
    if (!graph_.launch(stream)) {
      return Outcome::kNotStarted;
    }
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      if (outputs_[i].bytes != 0 &&
          driver.memcpy_device_async(pointer(outputs[i].mutable_data_ptr()),
                                     pointer(outputs_[i].address), outputs_[i].bytes,
                                     stream) != CudaDriver::kSuccess) {
        return Outcome::kFailed;
      }
    }
    return Outcome::kAnswered;
  } catch (...) {
    return Outcome::kNotStarted;
  }
}

}  // namespace eagercache
