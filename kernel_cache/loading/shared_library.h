#pragma once

#include <cstddef>
#include <filesystem>

#include "kernel_cache/base/status.h"

namespace eagercache {

// A loaded shared object. Never unloaded: other threads may be inside it, OpenMP workers spin in
// it, and the loader identifies libraries by path (a path never gets a second content in our
// store). Copyable; valid for the process's life.
class SharedLibrary {
 public:
  // dlopen(RTLD_NOW | RTLD_LOCAL). The caller has verified the file. kFull once `max_loaded()`
  // libraries are in this process, kIncompatible with the loader's text when dlopen fails.
  static Result<SharedLibrary> open(const std::filesystem::path& path);

  // The symbol's address or nullptr.
  void* symbol(const char* name) const noexcept;

  // Libraries opened through this class in this process, each path once.
  static std::size_t loaded_count() noexcept;
  // The cap: 2,000, and never more than a quarter of vm.max_map_count / 5.
  static std::size_t max_loaded() noexcept;

 private:
  explicit SharedLibrary(void* handle) noexcept : handle_(handle) {}
  void* handle_;
};

}  // namespace eagercache
