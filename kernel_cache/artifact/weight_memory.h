#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kernel_cache/base/status.h"

namespace eagercache {

// A range of a file's bytes in memory, page-aligned. Whoever holds the object may read them, from
// any thread; nobody writes them.
class WeightMemory {
 public:
  // Maps the range: pages come from the page cache when they are first read, and all processes that
  // map the file share them. What is written into the file later would be seen, and a file that is
  // cut off ends the process that reads behind its end. `offset` is a multiple of the page size,
  // which `size` need not be.
  static Result<std::shared_ptr<const WeightMemory>> map(int fd, std::uint64_t offset,
                                                         std::uint64_t size,
                                                         const std::string& path);
  // Reads the range into memory of its own.
  static Result<std::shared_ptr<const WeightMemory>> copy(int fd, std::uint64_t offset,
                                                          std::uint64_t size,
                                                          const std::string& path);
  ~WeightMemory();
  WeightMemory(const WeightMemory&) = delete;
  WeightMemory& operator=(const WeightMemory&) = delete;

  std::span<const std::byte> bytes() const noexcept {
    return {static_cast<const std::byte*>(data_), size_};
  }

 private:
  WeightMemory(void* data, std::size_t size) noexcept : data_(data), size_(size) {}

  void* data_;
  std::size_t size_;
};

}  // namespace eagercache
