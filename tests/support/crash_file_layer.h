#pragma once

#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/fault_file_layer.h"

namespace eagercache {

// What a power failure does to what was not flushed.
enum class CrashLoss {
  kNothing,     // everything written is there
  kDataZeroed,  // un-flushed files keep their length and read as zeros
  kDataCut,     // un-flushed files are empty
  kNamesLost,   // un-flushed names are undone, newest first
  kEverything,  // names undone, and un-flushed data cut
};

// A FaultFileLayer that remembers which data and names were not flushed, and can lose them.
class CrashFileLayer final : public FaultFileLayer {
 public:
  // With false, sync() reports success and flushes nothing: a lying disk.
  explicit CrashFileLayer(bool honest_sync) : honest_sync_(honest_sync) {
    set_sync_enabled(false);  // power failures are simulated, so the disk need not be waited for
  }

  // Changes the files as the loss would. Call once, after the calls.
  void lose(CrashLoss loss);

  int open(int directory, const char* name, int flags, mode_t mode) override;
  ssize_t write(int fd, const void* data, std::size_t size) override;
  int sync(int fd) override;
  int link(int from_directory, const char* from, int to_directory, const char* to) override;
  int rename(int from_directory, const char* from, int to_directory, const char* to,
             bool replace) override;
  int make_directory(int directory, const char* name, mode_t mode) override;

 private:
  using FileId = std::pair<dev_t, ino_t>;

  struct NewName {
    std::filesystem::path path;
    std::filesystem::path old_path;  // renames only
  };

  void note_name(int directory, const char* name, std::filesystem::path old_path);
  void damage(const std::filesystem::path& file, bool cut) const;

  const bool honest_sync_;
  std::mutex mutex_;
  std::map<FileId, std::filesystem::path> dirty_;  // un-flushed data; guarded by mutex_
  std::vector<NewName> names_;                     // un-flushed names, oldest first; likewise
};

}  // namespace eagercache
