#pragma once

#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>

namespace eagercache {

// A fresh directory of mode 0700, removed with its content at the end of the scope. In memory where
// that is possible, unless TMPDIR says where: tests make files by the thousand, and a disk that
// other programs keep busy makes a second's work a minute's.
class TemporaryDirectory {
 public:
  enum class Place { kMemory, kDisk };

  explicit TemporaryDirectory(Place place = Place::kMemory) {
    const bool in_memory = place == Place::kMemory && ::getenv("TMPDIR") == nullptr && has_memory();
    const std::filesystem::path parent =
        in_memory ? std::filesystem::path(kMemory) : std::filesystem::temp_directory_path();
    std::string name = (parent / "eagercache-XXXXXX").native();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed: " + name);
    path_ = name;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }

 private:
  static constexpr const char* kMemory = "/dev/shm";
  static constexpr std::uint64_t kRoom = std::uint64_t{512} << 20;

  // Containers often mount it small or noexec.
  static bool has_memory() {
    struct statvfs info {};
    return ::statvfs(kMemory, &info) == 0 && (info.f_flag & (ST_NOEXEC | ST_RDONLY)) == 0 &&
           std::uint64_t{info.f_bavail} * info.f_frsize > kRoom && ::access(kMemory, W_OK) == 0;
  }

  std::filesystem::path path_;
};

}  // namespace eagercache
