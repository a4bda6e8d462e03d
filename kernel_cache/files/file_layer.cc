#include "kernel_cache/files/file_layer.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace eagercache {
namespace {

// The result of a system call as "value or negated errno", repeated while a signal interrupts it.
template <typename Call>
auto retry(Call call) -> decltype(call()) {
  for (;;) {
    const auto result = call();
    if (result >= 0) return result;
    if (errno != EINTR) return -errno;
  }
}

int once(int result) { return result < 0 ? -errno : result; }

class PosixFileLayer final : public FileLayer {
 public:
  int open(int directory, const char* name, int flags, mode_t mode) override {
    return retry([&] {
      return ::openat(directory, name, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY,
                      mode);
    });
  }

  // Linux frees the descriptor even when close is interrupted; asking again could close another
  // thread's file.
  int close(int fd) override { return once(::close(fd)); }

  ssize_t read(int fd, void* buffer, std::size_t size) override {
    return retry([&] { return ::read(fd, buffer, size); });
  }

  ssize_t write(int fd, const void* data, std::size_t size) override {
    return retry([&] { return ::write(fd, data, size); });
  }

  int sync(int fd) override {
    return retry([&] { return ::fsync(fd); });
  }

  int status(int directory, const char* name, struct stat* out) override {
    return once(::fstatat(directory, name, out, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH));
  }

  int may_write(int directory) override { return once(::faccessat(directory, ".", W_OK, 0)); }

  int may_execute(int fd) override {
    struct statvfs info {};
    if (::fstatvfs(fd, &info) != 0) return -errno;
    return (info.f_flag & ST_NOEXEC) == 0 ? 1 : 0;
  }

  int set_mode(int directory, const char* name, mode_t mode) override {
    return once(*name == '\0' ? ::fchmod(directory, mode) : ::fchmodat(directory, name, mode, 0));
  }

  int set_time(int directory, const char* name, std::int64_t seconds) override {
    timespec clock{};
    ::clock_gettime(CLOCK_REALTIME, &clock);
    const std::array<timespec, 2> times{timespec{0, UTIME_OMIT}, timespec{seconds, clock.tv_nsec}};
    return once(::utimensat(directory, name, times.data(), AT_SYMLINK_NOFOLLOW));
  }

  int link(int from_directory, const char* from, int to_directory, const char* to) override {
    return once(::linkat(from_directory, from, to_directory, to, 0));
  }

  int rename(int from_directory, const char* from, int to_directory, const char* to,
             bool replace) override {
    return once(replace ? ::renameat(from_directory, from, to_directory, to)
                        : ::renameat2(from_directory, from, to_directory, to, RENAME_NOREPLACE));
  }

  int unlink(int directory, const char* name, bool is_directory) override {
    return once(::unlinkat(directory, name, is_directory ? AT_REMOVEDIR : 0));
  }

  int make_directory(int directory, const char* name, mode_t mode) override {
    return once(::mkdirat(directory, name, mode));
  }

  int list(int fd, std::vector<std::string>* names) override {
    // fdopendir takes its descriptor over, and shares the position with a dup: a new one it is.
    const int copy = open(fd, ".", O_RDONLY | O_DIRECTORY, 0);
    if (copy < 0) return copy;
    DIR* stream = ::fdopendir(copy);
    if (stream == nullptr) {
      const int error = errno;
      ::close(copy);
      return -error;
    }
    int result = 0;
    for (;;) {
      errno = 0;
      const dirent* entry = ::readdir(stream);
      if (entry == nullptr) {
        result = -errno;
        break;
      }
      const char* name = entry->d_name;
      if (std::strcmp(name, ".") != 0 && std::strcmp(name, "..") != 0) names->emplace_back(name);
    }
    ::closedir(stream);
    return result;
  }

  int read_link(int fd, std::string* target) override {
    std::array<char, PATH_MAX> buffer;
    const ssize_t size = ::readlinkat(fd, "", buffer.data(), buffer.size());
    if (size < 0) return -errno;
    target->assign(buffer.data(), static_cast<std::size_t>(size));
    return 0;
  }

  int lock(int fd, bool take) override {
    return retry([&] { return ::flock(fd, take ? LOCK_EX | LOCK_NB : LOCK_UN); });
  }

  std::int64_t now() override { return static_cast<std::int64_t>(std::time(nullptr)); }
};

}  // namespace

FileLayer& FileLayer::posix() {
  // Leaked: threads may still be in the store when static destructors run.
  static FileLayer* const layer = new PosixFileLayer;
  return *layer;
}

}  // namespace eagercache
