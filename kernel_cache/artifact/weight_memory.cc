#include "kernel_cache/artifact/weight_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

namespace eagercache {

Result<std::shared_ptr<const WeightMemory>> WeightMemory::map(int fd, std::uint64_t offset,
                                                              std::uint64_t size,
                                                              const std::string& path) {
  if (size == 0) {
    return std::shared_ptr<const WeightMemory>(new WeightMemory(nullptr, 0));
  }
  void* const data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) {
    return Status::from_errno(errno, "map", path);
  }
  return std::shared_ptr<const WeightMemory>(new WeightMemory(data, size));
}

Result<std::shared_ptr<const WeightMemory>> WeightMemory::copy(int fd, std::uint64_t offset,
                                                               std::uint64_t size,
                                                               const std::string& path) {
  if (size == 0) {
    return std::shared_ptr<const WeightMemory>(new WeightMemory(nullptr, 0));
  }
  void* const data =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return Status::from_errno(errno, "find memory for", path);
  }
  std::shared_ptr<const WeightMemory> memory(new WeightMemory(data, size));
  for (std::size_t done = 0; done < size;) {
    const ssize_t moved = ::pread(fd, static_cast<char*>(data) + done, size - done,
                                  static_cast<off_t>(offset + done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) {
      return moved < 0 ? Status::from_errno(errno, "read", path)
                       : Status(StatusCode::kCorrupt, path + " was cut off while it was read");
    }
    done += static_cast<std::size_t>(moved);
  }
  ::mprotect(data, size, PROT_READ);  // a slip of ours is a fault, not another model
  return memory;
}

WeightMemory::~WeightMemory() {
  if (data_ != nullptr) {
    ::munmap(data_, size_);
  }
}

}  // namespace eagercache
