#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_cache/base/digest.h"
#include "kernel_cache/base/status.h"
#include "kernel_cache/files/file_layer.h"
#include "kernel_cache/files/trust.h"
#include "kernel_cache/format/manifest.h"

namespace eagercache {

// Largest object that is stored or read, in bytes.
inline constexpr std::uint64_t kMaxObjectBytes = std::uint64_t{256} << 20;

// A file below the store. Mode, owner and type have been checked; kCorrupt when they do not fit.
struct CheckedFile {
  std::string bytes;
  struct stat info {};
};

// A manifest as it was found, and when the entry was last used (the file's modification time).
struct FoundEntry {
  Manifest manifest;
  std::string file;  // its name below the version directory
  std::int64_t last_used = 0;
  std::uint64_t bytes = 0;
};

// ROOT/v1, opened and checked. Names are relative to it, so moving or replacing the root under us
// does not mix two stores.
class TreeHandle {
 public:
  TreeHandle(FileLayer& files, ScopedFd directory, bool trusted);
  ~TreeHandle();
  TreeHandle(const TreeHandle&) = delete;
  TreeHandle& operator=(const TreeHandle&) = delete;

  int directory() const noexcept { return directory_.get(); }
  bool trusted() const noexcept { return trusted_; }
  // False where others may write, and on a file system that is mounted noexec.
  bool loads_in_place() const noexcept { return trusted_ && executable_; }
  // False when the directory was deleted, or when the process closed our descriptor behind our
  // back.
  bool alive() const;

  // One bit per fan-out directory that was checked already.
  struct Checked {
    std::array<std::atomic<std::uint64_t>, 4> bits{};
    bool test(std::uint8_t index) const noexcept {
      return (bits[index / 64].load(std::memory_order_relaxed) >> (index % 64) & 1) != 0;
    }
    void set(std::uint8_t index) noexcept {
      bits[index / 64].fetch_or(std::uint64_t{1} << (index % 64), std::memory_order_relaxed);
    }
  };
  mutable Checked checked_manifests;
  mutable Checked checked_objects;

 private:
  FileLayer& files_;
  ScopedFd directory_;
  bool trusted_;
  bool executable_;
  bool identified_ = false;  // device_ and inode_ are known
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

// One store directory, for reading: the private store, or a tier. Writes nothing. Thread-safe.
class StoreTree {
 public:
  StoreTree(FileLayer& files, std::filesystem::path root, std::string_view environment_text,
            TrustPolicy policy);

  // Opens and checks root, version directory and what is below; a store that is not there yet is
  // no error. Called again, it looks for a store that was deleted and made anew.
  Status open();
  // As open(), at most once a second; for readers that had a miss.
  void look_again();

  // nullptr while there is no store.
  std::shared_ptr<const TreeHandle> handle() const;
  void set_handle(std::shared_ptr<const TreeHandle> handle);

  // kNotFound, kCorrupt, kIncompatible, kIoError, kDenied, and kRefused (a directory that others
  // may write) say why there is none.
  Result<FoundEntry> find_kernel_or_decision(const Digest& key) const;
  Result<FoundEntry> find_failure(const Digest& key) const;
  // Whole, and equal to its digest.
  Result<std::string> read_object(const ObjectRef& object) const;
  // Whether every object is there with its size; the content is not looked at.
  bool has_objects(const Manifest& manifest) const;

  Result<CheckedFile> read_file(const std::string& name, std::uint64_t limit) const;
  // Names in a directory; none when it is missing.
  Result<std::vector<std::string>> list(const std::string& name) const;

  // Keys that this process must not use any more, where quarantine cannot write. At most 64.
  void block(const Digest& key) noexcept;
  bool is_blocked(const Digest& key) const noexcept;

  FileLayer& files() const noexcept { return files_; }
  const std::filesystem::path& root() const noexcept { return root_; }
  const std::string& environment() const noexcept { return environment_; }
  const Digest& environment_digest() const noexcept { return environment_digest_; }
  const TrustPolicy& policy() const noexcept { return policy_; }
  std::string full_path(const std::string& name) const;

 private:
  Result<FoundEntry> read_entry(const std::string& name, const Digest& key) const;
  Status check_fan_out(const TreeHandle& handle, TreeHandle::Checked& checked, std::uint8_t index,
                       const std::string& folder) const;

  FileLayer& files_;
  const std::filesystem::path root_;
  const std::string environment_;
  const Digest environment_digest_;
  const TrustPolicy policy_;
  std::shared_ptr<const TreeHandle> handle_;  // guarded by process_mutex()
  std::atomic<std::int64_t> next_look_{0};    // steady clock, nanoseconds
  std::array<std::atomic<std::uint64_t>, 64> blocked_{};
  std::atomic<std::size_t> blocked_count_{0};
};

// The directories below a version directory that a store has from its making on; each comes after
// the one it lies in. Those that objects and manifests are spread over are made when needed.
std::array<std::string, 8> layout_folders(const std::string& environment);

// Checks what is below an opened version directory: every directory that exists there must fit.
Status check_layout(FileLayer& files, int version_directory, const std::string& environment,
                    const std::string& path, const TrustPolicy& policy);

}  // namespace eagercache
