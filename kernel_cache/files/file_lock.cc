#include "kernel_cache/files/file_lock.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "kernel_cache/base/fork_guard.h"

namespace eagercache {

FileLock::FileLock(FileLayer& files, int fd) noexcept
    : files_(&files), fd_(fd), slot_(close_in_child(fd)), generation_(fork_generation()) {}

FileLock::FileLock(FileLock&& other) noexcept
    : files_(other.files_),
      fd_(std::exchange(other.fd_, -1)),
      slot_(std::exchange(other.slot_, -1)),
      generation_(other.generation_) {}

FileLock& FileLock::operator=(FileLock&& other) noexcept {
  std::swap(files_, other.files_);
  std::swap(fd_, other.fd_);
  std::swap(slot_, other.slot_);
  std::swap(generation_, other.generation_);
  return *this;
}

FileLock::~FileLock() { release(); }

Result<FileLock> FileLock::try_acquire(FileLayer& files, int directory, const char* name) {
  ScopedFd fd(files, files.open(directory, name, O_RDWR | O_CREAT, 0600));
  if (!fd.valid()) {
    return Status::from_errno(-fd.get(), "open lock", name);
  }
  struct stat info {};
  if (const int error = files.status(fd.get(), "", &info); error < 0) {
    return Status::from_errno(-error, "stat lock", name);
  }
  if (!S_ISREG(info.st_mode)) {
    return Status(StatusCode::kRefused, std::string(name) + " is not a regular file");
  }
  if ((info.st_mode & 0777) != 0600) {
    // Under an odd umask the file was made without our own permission; the next opener needs it.
    files.set_mode(fd.get(), "", 0600);
  }
  // Known to the fork handler before it is locked, so that no child can be born in between.
  FileLock lock(files, fd.release());
  if (const int error = files.lock(lock.fd_, true); error < 0) {
    if (error == -EWOULDBLOCK) {
      return Status(StatusCode::kBusy, std::string(name) + " is locked by another holder");
    }
    return Status::from_errno(-error, "lock", name);
  }
  return lock;
}

bool FileLock::held() const noexcept { return fd_ >= 0 && generation_ == fork_generation(); }

void FileLock::release() noexcept {
  if (fd_ < 0) return;
  const bool ours = held();
  const int fd = std::exchange(fd_, -1);
  if (!ours) {
    // The fork handler closed the descriptor; its number may be another file's by now.
    if (slot_ < 0) files_->close(fd);
    return;
  }
  // Unlock first: a child made by a bare clone may still share the open file.
  files_->lock(fd, false);
  forget_inherited(std::exchange(slot_, -1));
  files_->close(fd);
}

}  // namespace eagercache
