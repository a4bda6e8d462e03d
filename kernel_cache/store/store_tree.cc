#include "kernel_cache/store/store_tree.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "kernel_cache/base/fork_guard.h"
#include "kernel_cache/format/file_names.h"

namespace eagercache {
namespace {

constexpr std::int64_t kLookAgainNanoseconds = 1'000'000'000;

std::uint64_t first_word(const Digest& key) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, key.bytes.data(), sizeof word);
  // 0 is a free slot.
  return word == 0 ? 1 : word;
}

// Reads up to `limit` bytes; one byte more is an error, so a growing file cannot fill the memory.
Status read_all(FileLayer& files, int fd, std::uint64_t expected, std::uint64_t limit,
                const std::string& path, std::string* bytes) {
  if (expected > limit) return {StatusCode::kCorrupt, path + " is larger than it may be"};
  // Room for one more byte, so that the end is seen by a short read and not believed.
  bytes->resize(expected + 1);
  std::size_t done = 0;
  while (done < bytes->size()) {
    const ssize_t moved = files.read(fd, bytes->data() + done, bytes->size() - done);
    if (moved < 0) return Status::from_errno(static_cast<int>(-moved), "read", path);
    if (moved == 0) break;
    done += static_cast<std::size_t>(moved);
  }
  if (done != expected) return {StatusCode::kCorrupt, path + " changed while it was read"};
  bytes->resize(done);
  return Status::ok();
}

}  // namespace

TreeHandle::TreeHandle(FileLayer& files, ScopedFd directory, bool trusted)
    : files_(files),
      directory_(std::move(directory)),
      trusted_(trusted),
      executable_(files.may_execute(directory_.get()) != 0) {
  struct stat info {};
  if (files_.status(directory_.get(), "", &info) >= 0) {
    identified_ = true;
    device_ = info.st_dev;
    inode_ = info.st_ino;
  }
}

TreeHandle::~TreeHandle() {
  struct stat info {};
  const int error = files_.status(directory_.get(), "", &info);
  const bool other = identified_ && error >= 0 && (info.st_dev != device_ || info.st_ino != inode_);
  // A daemon may have closed all descriptors; the number can be another file's by now.
  if (other || error == -EBADF) directory_.release();
}

bool TreeHandle::alive() const {
  struct stat info {};
  return files_.status(directory_.get(), "", &info) >= 0 && info.st_dev == device_ &&
         info.st_ino == inode_ && info.st_nlink > 0;
}

StoreTree::StoreTree(FileLayer& files, std::filesystem::path root,
                     std::string_view environment_text, TrustPolicy policy)
    : files_(files),
      root_(std::move(root)),
      environment_(environment_id_of(environment_text)),
      environment_digest_(sha256(environment_text)),
      policy_(policy) {}

std::string StoreTree::full_path(const std::string& name) const {
  return (root_ / kVersionDirectory / name).native();
}

std::shared_ptr<const TreeHandle> StoreTree::handle() const {
  const std::scoped_lock lock(process_mutex());
  return handle_;
}

void StoreTree::set_handle(std::shared_ptr<const TreeHandle> handle) {
  // Swapped, so that the old one is destroyed after the mutex is released.
  const std::scoped_lock lock(process_mutex());
  handle_.swap(handle);
}

Status StoreTree::open() {
  auto root = open_trusted_root(files_, root_, policy_, /*create=*/false);
  if (!root) return root.code() == StatusCode::kNotFound ? Status::ok() : root.status();
  ScopedFd directory(
      files_, files_.open(root->directory.get(), kVersionDirectory, O_PATH | O_DIRECTORY, 0));
  if (directory.get() == -ENOENT) return Status::ok();
  if (!directory.valid()) {
    return Status::from_errno(-directory.get(), "open", (root_ / kVersionDirectory).native());
  }
  if (Status status = check_layout(files_, directory.get(), environment_,
                                   (root_ / kVersionDirectory).native(), policy_);
      !status) {
    return status;
  }
  set_handle(std::make_shared<const TreeHandle>(files_, std::move(directory), root->trusted));
  return Status::ok();
}

void StoreTree::look_again() {
  const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
  const std::int64_t now =
      std::chrono::duration_cast<std::chrono::nanoseconds>(since_start).count();
  std::int64_t next = next_look_.load(std::memory_order_relaxed);
  if (now < next) return;
  if (!next_look_.compare_exchange_strong(next, now + kLookAgainNanoseconds,
                                          std::memory_order_relaxed)) {
    return;
  }
  const auto current = handle();
  if (current != nullptr && current->alive()) return;
  // A refusal leaves the old handle, and so an empty store, which is what a reader should see.
  (void)open().is_ok();
}

Status StoreTree::check_fan_out(const TreeHandle& handle, TreeHandle::Checked& checked,
                                std::uint8_t index, const std::string& folder) const {
  if (checked.test(index)) return Status::ok();
  struct stat info {};
  if (const int error = files_.status(handle.directory(), folder.c_str(), &info); error < 0) {
    return Status::from_errno(-error, "stat", full_path(folder));
  }
  Status status = check_trust(info, FileRole::kDirectory, full_path(folder), policy_);
  if (status.is_ok()) checked.set(index);
  return status;
}

Result<CheckedFile> StoreTree::read_file(const std::string& name, std::uint64_t limit) const {
  const auto tree = handle();
  if (tree == nullptr) return Status(StatusCode::kNotFound, root_.native() + ": no store there");
  ScopedFd fd(files_, files_.open(tree->directory(), name.c_str(), O_RDONLY, 0));
  if (!fd.valid()) {
    const int error = -fd.get();
    // ELOOP: a symbolic link; ENXIO: a socket. Neither is a file of ours.
    if (error == ELOOP || error == ENXIO) {
      return Status(StatusCode::kCorrupt, full_path(name) + " is not a regular file");
    }
    return Status::from_errno(error, "open", full_path(name));
  }
  CheckedFile file;
  if (const int error = files_.status(fd.get(), "", &file.info); error < 0) {
    return Status::from_errno(-error, "stat", full_path(name));
  }
  if (Status status = check_trust(file.info, FileRole::kFile, full_path(name), policy_); !status) {
    // In a directory of ours, such a file is not what was published, whatever its content.
    return Status(StatusCode::kCorrupt, status.message());
  }
  if (Status status = read_all(files_, fd.get(), static_cast<std::uint64_t>(file.info.st_size),
                               limit, full_path(name), &file.bytes);
      !status) {
    return status;
  }
  return file;
}

Result<FoundEntry> StoreTree::read_entry(const std::string& name, const Digest& key) const {
  Result<CheckedFile> file = read_file(name, kMaxManifestBytes);
  if (!file) return file.status();
  Result<Manifest> manifest = decode_manifest(file->bytes);
  if (!manifest) {
    return Status(manifest.code(), full_path(name) + ": " + manifest.status().message());
  }
  if (manifest->key != key) {
    return Status(StatusCode::kCorrupt, full_path(name) + " holds another key's manifest");
  }
  if (manifest->environment != environment_digest_) {
    return Status(StatusCode::kCorrupt, full_path(name) + " was made in another environment");
  }
  return FoundEntry{std::move(manifest).value(), name,
                    static_cast<std::int64_t>(file->info.st_mtim.tv_sec), file->bytes.size()};
}

Result<FoundEntry> StoreTree::find_kernel_or_decision(const Digest& key) const {
  const auto tree = handle();
  if (tree == nullptr) return Status(StatusCode::kNotFound, root_.native() + ": no store there");
  const std::string name = manifest_file(environment_, key);
  if (Status status = check_fan_out(*tree, tree->checked_manifests, key.bytes[0],
                                    name.substr(0, name.rfind('/')));
      !status) {
    return status;
  }
  Result<FoundEntry> entry = read_entry(name, key);
  if (entry && entry->manifest.kind == EntryKind::kFailed) {
    return Status(StatusCode::kCorrupt, full_path(name) + " is a failure among the kernels");
  }
  return entry;
}

Result<FoundEntry> StoreTree::find_failure(const Digest& key) const {
  const std::string name = failure_file(environment_, key);
  Result<FoundEntry> entry = read_entry(name, key);
  if (entry && entry->manifest.kind != EntryKind::kFailed) {
    return Status(StatusCode::kCorrupt, full_path(name) + " is no failure");
  }
  return entry;
}

Result<std::string> StoreTree::read_object(const ObjectRef& object) const {
  const auto tree = handle();
  if (tree == nullptr) return Status(StatusCode::kNotFound, root_.native() + ": no store there");
  const std::string name = object_file(object.kind, object.digest);
  if (Status status = check_fan_out(*tree, tree->checked_objects, object.digest.bytes[0],
                                    name.substr(0, name.rfind('/')));
      !status) {
    return status;
  }
  Result<CheckedFile> file = read_file(name, kMaxObjectBytes);
  if (!file) return file.status();
  if (file->bytes.size() != object.size) {
    return Status(StatusCode::kCorrupt, full_path(name) + " has another size than was published");
  }
  if (sha256(file->bytes) != object.digest) {
    return Status(StatusCode::kCorrupt, full_path(name) + " differs from what was published");
  }
  return std::move(file->bytes);
}

bool StoreTree::has_objects(const Manifest& manifest) const {
  const auto tree = handle();
  return tree != nullptr &&
         std::all_of(manifest.objects.begin(), manifest.objects.end(),
                     [&](const ObjectRef& object) {
                       struct stat info {};
                       const std::string name = object_file(object.kind, object.digest);
                       return files_.status(tree->directory(), name.c_str(), &info) >= 0 &&
                              S_ISREG(info.st_mode) &&
                              static_cast<std::uint64_t>(info.st_size) == object.size;
                     });
}

Result<std::vector<std::string>> StoreTree::list(const std::string& name) const {
  std::vector<std::string> names;
  const auto tree = handle();
  if (tree == nullptr) return names;
  ScopedFd fd(files_, files_.open(tree->directory(), name.c_str(), O_RDONLY | O_DIRECTORY, 0));
  if (fd.get() == -ENOENT) return names;
  if (!fd.valid()) return Status::from_errno(-fd.get(), "open", full_path(name));
  if (const int error = files_.list(fd.get(), &names); error < 0) {
    return Status::from_errno(-error, "list", full_path(name));
  }
  return names;
}

void StoreTree::block(const Digest& key) noexcept {
  const std::size_t slot = blocked_count_.fetch_add(1, std::memory_order_relaxed);
  if (slot < blocked_.size()) blocked_[slot].store(first_word(key), std::memory_order_relaxed);
}

bool StoreTree::is_blocked(const Digest& key) const noexcept {
  const std::size_t count =
      std::min(blocked_count_.load(std::memory_order_relaxed), blocked_.size());
  return std::any_of(blocked_.begin(), blocked_.begin() + static_cast<std::ptrdiff_t>(count),
                     [word = first_word(key)](const std::atomic<std::uint64_t>& slot) {
                       return slot.load(std::memory_order_relaxed) == word;
                     });
}

std::array<std::string, 8> layout_folders(const std::string& environment) {
  return {kObjectsDirectory,
          kLocksDirectory,
          kTemporaryDirectory,
          kQuarantineDirectory,
          environment,
          environment_folder(environment, kManifestsDirectory),
          environment_folder(environment, kAttemptsDirectory),
          environment_folder(environment, kFailuresDirectory)};
}

Status check_layout(FileLayer& files, int version_directory, const std::string& environment,
                    const std::string& path, const TrustPolicy& policy) {
  std::vector<std::string> names{""};
  for (std::string& folder : layout_folders(environment)) names.push_back(std::move(folder));
  for (const std::string& name : names) {
    struct stat info {};
    const int error = files.status(version_directory, name.c_str(), &info);
    if (error == -ENOENT) continue;
    const std::string full = name.empty() ? path : path + "/" + name;
    if (error < 0) return Status::from_errno(-error, "stat", full);
    if (Status status = check_trust(info, FileRole::kDirectory, full, policy); !status) {
      return status;
    }
  }
  return Status::ok();
}

}  // namespace eagercache
