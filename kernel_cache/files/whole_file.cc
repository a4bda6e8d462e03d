#include "kernel_cache/files/whole_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <system_error>
#include <utility>

#include "kernel_cache/format/file_names.h"

namespace eagercache {
namespace {

constexpr std::time_t kAbandonedSeconds = 3600;

// Takes away what processes of this user left that died while they wrote the file. A clock that
// was put back makes them seem to be of the future.
void remove_abandoned(const std::filesystem::path& prefix) noexcept {
  try {
    const std::string begin = prefix.filename().string();
    const std::filesystem::path folder =
        prefix.has_parent_path() ? prefix.parent_path() : std::filesystem::path(".");
    std::error_code error;
    for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
         entry.increment(error)) {
      const std::string leaf = entry->path().filename().string();
      struct stat info {};
      if (leaf.starts_with(begin) &&
          leaf.find_first_not_of("0123456789", begin.size()) == std::string::npos &&
          ::lstat(entry->path().c_str(), &info) == 0 && S_ISREG(info.st_mode) &&
          info.st_uid == ::geteuid() &&
          std::abs(std::time(nullptr) - info.st_mtime) > kAbandonedSeconds) {
        ::unlink(entry->path().c_str());
      }
    }
  } catch (const std::exception&) {
    // They stay until the next time.
  }
}

}  // namespace

Result<WholeFile> WholeFile::create(const std::filesystem::path& path) {
  // The rename would take away a device or a pipe, such as /dev/null, and leave a file there.
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return Status(StatusCode::kInvalidArgument,
                  path.string() + " is there and is no regular file; name another file");
  }
  const std::string prefix = path.string() + ".part";
  remove_abandoned(prefix);
  // Random: in containers the process that died here had the number that we have.
  std::string temporary = prefix + std::to_string(new_temporary_name(false).random);
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
