#include "kernel_cache/files/whole_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace eagercache {

Result<WholeFile> WholeFile::create(const std::filesystem::path& path) {
  std::string temporary = path.string() + ".part" + std::to_string(::getpid());
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) {
    return Status::from_errno(errno, "create", temporary);
  }
  return WholeFile(path, std::move(temporary), fd);
}

WholeFile::WholeFile(WholeFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)),
      fd_(std::exchange(other.fd_, -1)),
      written_(other.written_) {}

WholeFile::~WholeFile() {
  if (fd_ >= 0) {
    ::close(fd_);
    ::unlink(temporary_.c_str());
  }
}

Status WholeFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t moved = ::write(fd_, bytes.data(), bytes.size());
    if (moved < 0 && errno != EINTR) {
      return Status::from_errno(errno, "write", temporary_);
    }
    const auto done = static_cast<std::size_t>(moved < 0 ? 0 : moved);
    bytes.remove_prefix(done);
    written_ += done;
  }
  return Status::ok();
}

Status WholeFile::publish() {
  if (::fsync(fd_) != 0) {
    return Status::from_errno(errno, "fsync", temporary_);
  }
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    return Status::from_errno(errno, "rename", temporary_);
  }
  ::close(std::exchange(fd_, -1));
  return Status::ok();
}

}  // namespace eagercache
