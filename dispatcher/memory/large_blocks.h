#pragma once

// Memory for the large tensors of kernels on CPU, which threads keep instead of giving it back. A
// block belongs to the tensor that has it, then to the thread that dropped it.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstddef>

namespace eagercache {

constexpr std::size_t kLeastLargeBlock = 8U << 10;
constexpr std::size_t kMostLargeBlock = 4U << 20;
constexpr std::size_t kMostKeptByThread = 16U << 20;
constexpr std::size_t kMostKeptByProcess = 64U << 20;

// Memory of a tensor, or of a kernel's scratch, such as c10::GetCPUAllocator() gives:
// uninitialised, aligned to 64 bytes, to be freed by any thread. Throws what that throws. Any
// thread.
//
// More than kLeastLargeBlock and at most kMostLargeBlock bytes are a block that threads keep for
// the next one of about that size. malloc hands such memory back to the operating system, and to
// touch new pages of it takes as long as many an operator. A thread keeps the sixteen blocks that
// it dropped last, of kMostKeptByThread bytes together, all threads no more than
// kMostKeptByProcess. They are freed when the thread ends, and when there is no memory for another
// block. A thread that never took one keeps none.
c10::DataPtr allocate_block(std::size_t bytes);

// Whether PyTorch's own allocation has more to do than to allocate: its CPU allocator, which
// `current` is, is another than the default one, or memory is being profiled. Then it is used.
inline bool allocation_is_watched(const c10::Allocator* current) {
  static c10::Allocator* const usual = c10::GetDefaultCPUAllocator();
  return current != usual || c10::memoryProfilingEnabled();
}

// While it lives the calling thread keeps no blocks and has none: kernels are timed so, since a
// program may drop more than is kept. Frees those that it has. Nests.
class WithoutKeptBlocks {
 public:
  WithoutKeptBlocks() noexcept;
  ~WithoutKeptBlocks();
  WithoutKeptBlocks(const WithoutKeptBlocks&) = delete;
  WithoutKeptBlocks& operator=(const WithoutKeptBlocks&) = delete;

 private:
  const bool outermost_;
};

// Bytes that the calling thread, or all threads, keep now. For tests.
std::size_t kept_by_thread() noexcept;
std::size_t kept_by_process() noexcept;

}  // namespace eagercache
