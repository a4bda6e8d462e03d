#pragma once

#include <cstdint>

#include "kernel_cache/base/status.h"
#include "kernel_cache/files/file_layer.h"

namespace eagercache {

// An exclusive flock on a file that is never deleted, truncated or written. The kernel frees it
// when the process dies, however it dies. Never waited for, never inherited: children close it at
// fork (fork_guard.h) or exec (O_CLOEXEC) without unlocking.
//
// Movable. Releasing (or destroying) an inherited copy in a forked child does nothing.
class FileLock {
 public:
  // Opens `name` below `directory`, creating it with mode 0600, and tries to lock it once. kBusy
  // when another open file holds it, in this process too; kRefused when it is not a regular file.
  static Result<FileLock> try_acquire(FileLayer& files, int directory, const char* name);

  FileLock(FileLock&& other) noexcept;
  FileLock& operator=(FileLock&& other) noexcept;
  ~FileLock();

  void release() noexcept;
  // False after release, after a move, and in a forked child.
  bool held() const noexcept;
  // The locked file, open for reading and writing; valid while held().
  int descriptor() const noexcept { return fd_; }

 private:
  FileLock(FileLayer& files, int fd) noexcept;

  FileLayer* files_;
  int fd_;
  int slot_;
  std::uint64_t generation_;
};

}  // namespace eagercache
