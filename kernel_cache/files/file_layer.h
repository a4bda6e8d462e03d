#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace eagercache {

// Every call that the store makes to the operating system's files. One virtual interface, so that
// tests can fail the n-th call, stop after any call, or move the clock.
//
// Names are relative to `directory`, a descriptor (or AT_FDCWD); the last component is never
// followed when it is a symbolic link. Every function returns a value >= 0, or a negated errno.
// Thread-safe.
class FileLayer {
 public:
  virtual ~FileLayer() = default;

  // A descriptor, always close-on-exec and non-blocking (a FIFO must not stop us).
  virtual int open(int directory, const char* name, int flags, mode_t mode) = 0;
  virtual int close(int fd) = 0;
  // Bytes moved, possibly fewer than asked; 0 from read is the end.
  virtual ssize_t read(int fd, void* buffer, std::size_t size) = 0;
  virtual ssize_t write(int fd, const void* data, std::size_t size) = 0;
  // Flushes a file or a directory to the device.
  virtual int sync(int fd) = 0;
  // An empty name means `directory` itself, which may then be any descriptor.
  virtual int status(int directory, const char* name, struct stat* out) = 0;
  // 0 when this process may make files in the directory, else the negated errno (EACCES, EROFS).
  virtual int may_write(int directory) = 0;
  // 1 when files of the file system that `fd` is on may be run, 0 when it is mounted noexec.
  virtual int may_execute(int fd) = 0;
  // As status; the empty name is allowed.
  virtual int set_mode(int directory, const char* name, mode_t mode) = 0;
  // Sets the modification time, in seconds since the epoch. Its nanoseconds are the clock's, so
  // that a file which is touched twice within a second has two times.
  virtual int set_time(int directory, const char* name, std::int64_t seconds) = 0;
  virtual int link(int from_directory, const char* from, int to_directory, const char* to) = 0;
  // With `replace` false, -EEXIST when `to` exists.
  virtual int rename(int from_directory, const char* from, int to_directory, const char* to,
                     bool replace) = 0;
  // `is_directory` removes an empty directory instead of a file.
  virtual int unlink(int directory, const char* name, bool is_directory) = 0;
  virtual int make_directory(int directory, const char* name, mode_t mode) = 0;
  // Appends the names in the directory `fd`, without "." and "..", in no order.
  virtual int list(int fd, std::vector<std::string>* names) = 0;
  // The target of the symbolic link that `fd` (opened with O_PATH) is.
  virtual int read_link(int fd, std::string* target) = 0;
  // Takes (or gives up) an exclusive flock; never waits: -EWOULDBLOCK when another one holds it.
  virtual int lock(int fd, bool take) = 0;
  // Seconds since the epoch.
  virtual std::int64_t now() = 0;

  // The operating system's own. Never destroyed.
  static FileLayer& posix();
};

// An owned descriptor. Closes through its layer; errors of that close are of no interest (a writer
// calls close() and looks).
class ScopedFd {
 public:
  ScopedFd() noexcept = default;
  ScopedFd(FileLayer& files, int fd) noexcept : files_(&files), fd_(fd) {}
  ScopedFd(ScopedFd&& other) noexcept : files_(other.files_), fd_(std::exchange(other.fd_, -1)) {}
  ScopedFd& operator=(ScopedFd&& other) noexcept {
    std::swap(files_, other.files_);
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~ScopedFd() {
    if (fd_ >= 0) files_->close(fd_);
  }

  bool valid() const noexcept { return fd_ >= 0; }
  // The descriptor, or the negated errno that open() gave.
  int get() const noexcept { return fd_; }
  int release() noexcept { return std::exchange(fd_, -1); }
  // 0 or a negated errno; the descriptor is gone either way.
  int close() { return files_->close(release()); }

 private:
  FileLayer* files_ = nullptr;
  int fd_ = -1;
};

}  // namespace eagercache
