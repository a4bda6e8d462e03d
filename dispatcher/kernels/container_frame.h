#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "dispatcher/memory/output_allocation.h"
#include "kernel_cache/loading/shared_library.h"

namespace eagercache {

// One run of an operator's container on this thread. Such containers are linked so that they come
// here before they ask torch for a tensor's memory or drop a handle (container.py, SEAMS): memory
// is OutputSpec's then, and handles, which are at::Tensor* of the C ABI, lie in the frame and not
// on the heap. What is not known here is torch's, as ever. Frames of one thread nest; a frame must
// not be used by another thread, nor a handle of it after it.
class ContainerFrame {
 public:
  static constexpr std::size_t kMostInputs = 16;
  static constexpr std::size_t kMostMade = 8;

  // What a container makes: a tensor of these sizes and strides, in elements.
  struct Made {
    c10::ScalarType dtype;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    OutputSpec spec{dtype, sizes, strides};

    bool is(c10::ScalarType other, at::IntArrayRef its_sizes,
            at::IntArrayRef its_strides) const noexcept {
      return dtype == other && its_sizes.equals(sizes) && its_strides.equals(strides);
    }
  };

  // Whether the library has the other end of this, which is connected from then on. Any thread.
  static bool connect(const SharedLibrary& library);

  // Everything is torch's. `noted`, which may be null, gets what is made meanwhile, each once.
  explicit ContainerFrame(std::vector<Made>* noted) noexcept;

  // Answers for what is `known`, which outlives it, and gives a handle for each of at most
  // kMostInputs inputs.
  ContainerFrame(std::span<const Made> known, std::span<const at::Tensor* const> inputs,
                 void** handles) noexcept;

  ~ContainerFrame();
  ContainerFrame(const ContainerFrame&) = delete;
  ContainerFrame& operator=(const ContainerFrame&) = delete;

  // Whether the handle is one of the frame's, which nobody deletes.
  bool has(const void* handle) const noexcept;

 private:
  static constexpr std::size_t kMostHandles = kMostInputs + 8;

  static std::int32_t make(std::int64_t dimensions, const std::int64_t* sizes,
                           const std::int64_t* strides, std::int32_t dtype,
                           std::int32_t device_type, std::int32_t device_index,
                           void** handle) noexcept;
  static std::int32_t drop(void* handle) noexcept;

  at::Tensor* slots() noexcept { return reinterpret_cast<at::Tensor*>(memory_.data()); }
  bool allocate(c10::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                void** handle);
  void note(c10::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides);

  ContainerFrame* const outer_;
  std::vector<Made>* const noted_ = nullptr;
  const std::span<const Made> known_;
  std::size_t num_slots_ = 0;
  // So many at::Tensor, of which the first num_slots_ live.
  alignas(at::Tensor) std::array<std::byte, kMostHandles * sizeof(at::Tensor)> memory_;
};

}  // namespace eagercache
