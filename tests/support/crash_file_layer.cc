#include "tests/support/crash_file_layer.h"

#include <fcntl.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <system_error>

namespace eagercache {
namespace {

namespace fs = std::filesystem;

fs::path path_of(int directory, const char* name) {
  if (directory == AT_FDCWD) return fs::absolute(name);
  std::error_code ignored;
  return fs::read_symlink("/proc/self/fd/" + std::to_string(directory), ignored) / name;
}

std::pair<dev_t, ino_t> id_of(int fd) {
  struct stat info {};
  FileLayer::posix().status(fd, "", &info);
  return {info.st_dev, info.st_ino};
}

}  // namespace

void CrashFileLayer::note_name(int directory, const char* name, fs::path old_path) {
  const std::scoped_lock lock(mutex_);
  names_.push_back({path_of(directory, name), std::move(old_path)});
}

int CrashFileLayer::open(int directory, const char* name, int flags, mode_t mode) {
  const int fd = FaultFileLayer::open(directory, name, flags, mode);
  if (fd >= 0 && (flags & O_EXCL) != 0) note_name(directory, name, {});
  return fd;
}

ssize_t CrashFileLayer::write(int fd, const void* data, std::size_t size) {
  const ssize_t moved = FaultFileLayer::write(fd, data, size);
  if (moved > 0) {
    const std::scoped_lock lock(mutex_);
    dirty_[id_of(fd)] = path_of(fd, "").parent_path();
  }
  return moved;
}

int CrashFileLayer::sync(int fd) {
  const int result = FaultFileLayer::sync(fd);
  if (result < 0 || !honest_sync_) return result;
  const std::scoped_lock lock(mutex_);
  dirty_.erase(id_of(fd));
  const fs::path folder = path_of(fd, "").parent_path();
  std::erase_if(names_, [&](const NewName& name) { return name.path.parent_path() == folder; });
  return result;
}

int CrashFileLayer::link(int from_directory, const char* from, int to_directory, const char* to) {
  const int result = FaultFileLayer::link(from_directory, from, to_directory, to);
  if (result >= 0) note_name(to_directory, to, {});
  return result;
}

int CrashFileLayer::rename(int from_directory, const char* from, int to_directory, const char* to,
                           bool replace) {
  const int result = FaultFileLayer::rename(from_directory, from, to_directory, to, replace);
  if (result >= 0) note_name(to_directory, to, path_of(from_directory, from));
  return result;
}

int CrashFileLayer::make_directory(int directory, const char* name, mode_t mode) {
  const int result = FaultFileLayer::make_directory(directory, name, mode);
  if (result >= 0) note_name(directory, name, {});
  return result;
}

void CrashFileLayer::damage(const fs::path& file, bool cut) const {
  std::error_code error;
  const auto size = fs::file_size(file, error);
  if (error) return;
  const fs::perms before = fs::status(file).permissions();
  fs::permissions(file, fs::perms::owner_read | fs::perms::owner_write);
  std::ofstream(file, std::ios::binary | std::ios::trunc) << std::string(cut ? 0 : size, '\0');
  fs::permissions(file, before);
}

void CrashFileLayer::lose(CrashLoss loss) {
  const std::scoped_lock lock(mutex_);
  const bool cut = loss == CrashLoss::kDataCut || loss == CrashLoss::kEverything;
  if (cut || loss == CrashLoss::kDataZeroed) {
    // A dirty file may be known by its temporary name, by its published one, or by both; all are
    // the same data.
    for (const auto& [id, path] : dirty_) {
      damage(path, cut);
      for (const NewName& name : names_) {
        struct stat info {};
        if (::stat(name.path.c_str(), &info) == 0 && FileId(info.st_dev, info.st_ino) == id) {
          damage(name.path, cut);
        }
      }
    }
  }
  if (loss != CrashLoss::kNamesLost && loss != CrashLoss::kEverything) return;
  for (auto name = names_.rbegin(); name != names_.rend(); ++name) {
    std::error_code ignored;
    if (name->old_path.empty()) {
      fs::remove_all(name->path, ignored);
    } else {
      fs::rename(name->path, name->old_path, ignored);
    }
  }
}

}  // namespace eagercache
