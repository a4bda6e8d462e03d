#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace eagercache {

// The metadata of one tensor that a CPU kernel makes, with what follows from it worked out once.
class OutputSpec {
 public:
  OutputSpec(c10::ScalarType dtype, std::vector<std::int64_t> sizes,
             std::vector<std::int64_t> strides);

  // A new uninitialised tensor, such as at::empty_strided makes: aligned to 64 bytes, resizable
  // through PyTorch's allocator, to be freed by any thread, an inference tensor in inference mode.
  //
  // Small ones take their memory from blocks that the calling thread keeps, which costs a fifth of
  // what the system's aligned allocation does. PyTorch's own allocation is used where its CPU
  // allocator is another than the default one, and while memory is being profiled. Throws
  // c10::Error without memory. Any thread.
  at::Tensor allocate() const;

 private:
  c10::ScalarType dtype_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::int64_t> strides_;
  std::size_t bytes_;
  std::size_t block_class_;  // of the block that holds so many bytes
};

// Blocks that the calling thread keeps now, of all sizes together. For tests.
std::size_t kept_blocks() noexcept;

}  // namespace eagercache
