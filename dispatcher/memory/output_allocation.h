#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/SizesAndStrides.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace eagercache {

// The fields of a tensor that follow from its sizes and strides.
struct OutputForm {
  c10::impl::SizesAndStrides sizes_and_strides;
  std::int64_t numel = 0;
  bool contiguous = false;
  bool channels_last = false;
  bool channels_last_contiguous = false;
  bool channels_last_3d = false;
  bool channels_last_3d_contiguous = false;
  bool dense = false;
};

// The metadata of one tensor that a CPU kernel makes, with what follows from it worked out once.
class OutputSpec {
 public:
  OutputSpec(c10::ScalarType dtype, std::vector<std::int64_t> sizes,
             std::vector<std::int64_t> strides);

  // A new uninitialised tensor, such as at::empty_strided makes: aligned to 64 bytes, resizable
  // through PyTorch's allocator, to be freed by any thread, an inference tensor in inference mode.
  //
  // The tensor's and the storage's objects, and data of up to 8 KB, are blocks that the calling
  // thread keeps, which costs a fifth of what the system's allocation does; larger data are those
  // of large_blocks.h. PyTorch's own allocation is used where that is watched. Throws c10::Error or
  // std::bad_alloc without memory. Any thread.
  at::Tensor allocate() const;

 private:
  c10::ScalarType dtype_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::int64_t> strides_;
  OutputForm form_;
  std::size_t bytes_;
  std::size_t block_class_;  // of the block that holds so many bytes
};

// The same, of metadata that is another for every call.
at::Tensor allocate_output(c10::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides);

// Blocks that the calling thread keeps now, of all sizes up to 8 KB together. For tests.
std::size_t kept_blocks() noexcept;

}  // namespace eagercache
