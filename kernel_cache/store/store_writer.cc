#include "kernel_cache/store/store_writer.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>
#include <vector>

namespace eagercache {
namespace {

constexpr std::size_t kMaxQuarantined = 64;
constexpr std::int64_t kQuarantineSeconds = 7 * 24 * 3600;
constexpr int kMaxDepth = 16;
constexpr std::size_t kMaxEnvironmentBytes = std::size_t{1} << 20;

std::string parent_of(const std::string& name) { return name.substr(0, name.rfind('/')); }

Status write_all(FileLayer& files, int fd, std::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t moved = files.write(fd, bytes.data(), bytes.size());
    if (moved <= 0) {
      return Status::from_errno(moved == 0 ? EIO : static_cast<int>(-moved), "write", path);
    }
    bytes.remove_prefix(static_cast<std::size_t>(moved));
  }
  return Status::ok();
}

// Some file systems have no hard links, or none for us.
bool links_are_unsupported(int error) noexcept {
  return error == -EPERM || error == -EOPNOTSUPP || error == -ENOSYS || error == -EMLINK ||
         error == -EXDEV || error == -EINVAL;
}

int rename_to_new_name(FileLayer& files, int directory, const char* from, const char* to) {
  const int result = files.rename(directory, from, directory, to, /*replace=*/false);
  if (result != -EINVAL && result != -ENOSYS) return result;
  // Not atomic with the look: the later of two equal writers wins, and both wrote a valid file.
  struct stat info {};
  if (files.status(directory, to, &info) >= 0) return -EEXIST;
  return files.rename(directory, from, directory, to, /*replace=*/true);
}

bool remove_below(FileLayer& files, int directory, const std::string& name, int depth) {
  struct stat info {};
  const int error = files.status(directory, name.c_str(), &info);
  if (error < 0) return error == -ENOENT;
  if (!S_ISDIR(info.st_mode)) return files.unlink(directory, name.c_str(), false) >= 0;
  if (depth == kMaxDepth) return false;
  {
    ScopedFd fd(files, files.open(directory, name.c_str(), O_RDONLY | O_DIRECTORY, 0));
    std::vector<std::string> names;
    if (!fd.valid() || files.list(fd.get(), &names) < 0) return false;
    for (const std::string& child : names) remove_below(files, fd.get(), child, depth + 1);
  }
  return files.unlink(directory, name.c_str(), true) >= 0;
}

}  // namespace

Status StoreWriter::ensure_layout(bool thorough) {
  const auto current = tree_.handle();
  if (thorough || current == nullptr || !current->alive()) return make_layout();
  // Every one: a deletion that met somebody who made them anew leaves any of them missing.
  for (const std::string& folder : layout_folders(tree_.environment())) {
    struct stat info {};
    if (tree_.files().status(current->directory(), folder.c_str(), &info) < 0) return make_layout();
  }
  return Status::ok();
}

Status StoreWriter::make_layout() {
  FileLayer& files = tree_.files();
  const std::string root_path = tree_.root().native();
  auto root = open_trusted_root(files, tree_.root(), tree_.policy(), /*create=*/true);
  if (!root) return root.status();
  const int root_fd = root->directory.get();
  const std::string path = root_path + "/" + kVersionDirectory;
  if (Status status = make_private_directory(files, root_fd, kVersionDirectory, path); !status) {
    return status;
  }
  ScopedFd version(files, files.open(root_fd, kVersionDirectory, O_PATH | O_DIRECTORY, 0));
  if (!version.valid()) return Status::from_errno(-version.get(), "open", path);
  if (Status status = check_layout(files, version.get(), tree_.environment(), path, tree_.policy());
      !status) {
    return status;
  }
  for (const std::string& name : layout_folders(tree_.environment())) {
    if (Status status = make_private_directory(files, version.get(), name, path + "/" + name);
        !status) {
      return status;
    }
  }
  tree_.set_handle(std::make_shared<const TreeHandle>(files, std::move(version), root->trusted));
  if (Status status = write_format(root_fd); !status) return status;
  return write_environment();
}

Status StoreWriter::write_format(int root_directory) {
  FileLayer& files = tree_.files();
  struct stat info {};
  if (files.status(root_directory, kFormatFile, &info) >= 0) return Status::ok();
  const TemporaryName one = new_temporary_name(false);
  const TemporaryName two = new_temporary_name(false);
  const std::string store_id =
      sha256(temporary_file(one) + temporary_file(two)).hex().substr(0, 32);
  auto temporary = write_temporary("eagercache-store 1\nid " + store_id + "\n");
  if (!temporary) return temporary.status();
  const auto tree = tree_.handle();
  int result = files.link(tree->directory(), temporary->name(), root_directory, kFormatFile);
  if (links_are_unsupported(result)) {
    result = files.rename(tree->directory(), temporary->name(), root_directory, kFormatFile, true);
  }
  if (result < 0 && result != -EEXIST) {
    return Status::from_errno(-result, "create", (tree_.root() / kFormatFile).native());
  }
  return Status::ok();
}

Status StoreWriter::write_environment() {
  const std::string name = environment_file(tree_.environment());
  const Result<CheckedFile> there = tree_.read_file(name, kMaxEnvironmentBytes);
  if (there && there->bytes == environment_text_) return Status::ok();
  if (there && environment_id_of(there->bytes) == tree_.environment()) {
    return {StatusCode::kIncompatible,
            tree_.full_path(name) + " is another environment's, with the same short name"};
  }
  // Missing, or damaged: its name is the hash of its content.
  auto temporary = write_temporary(environment_text_);
  if (!temporary) return temporary.status();
  return replace(temporary.value(), name);
}

Result<TemporaryFile> StoreWriter::write_temporary(std::string_view bytes) {
  FileLayer& files = tree_.files();
  auto tree = tree_.handle();
  if (tree == nullptr) return Status(StatusCode::kNotFound, "the store is gone");
  std::string name = temporary_file(new_temporary_name(false));
  ScopedFd fd(files,
              files.open(tree->directory(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0600));
  const std::string path = tree_.full_path(name);
  if (!fd.valid()) return Status::from_errno(-fd.get(), "create", path);
  TemporaryFile temporary(std::move(tree), files, std::move(name));
  if (Status status = write_all(files, fd.get(), bytes, path); !status) return status;
  if (const int error = files.set_mode(fd.get(), "", 0444); error < 0) {
    return Status::from_errno(-error, "set mode of", path);
  }
  if (const int error = files.sync(fd.get()); error < 0) {
    return Status::from_errno(-error, "flush", path);
  }
  // Quota errors of network file systems show at close.
  if (const int error = fd.close(); error < 0) return Status::from_errno(-error, "close", path);
  return temporary;
}

Result<Committed> StoreWriter::commit(const TemporaryFile& temporary, const std::string& name) {
  FileLayer& files = tree_.files();
  const auto tree = tree_.handle();
  if (tree == nullptr) return Status(StatusCode::kNotFound, "the store is gone");
  const int directory = tree->directory();
  int result = files.link(directory, temporary.name(), directory, name.c_str());
  if (result == -ENOENT) {
    const std::string parent = parent_of(name);
    if (Status status = make_private_directory(files, directory, parent, tree_.full_path(parent));
        !status) {
      return status;
    }
    result = files.link(directory, temporary.name(), directory, name.c_str());
  }
  if (links_are_unsupported(result)) {
    result = rename_to_new_name(files, directory, temporary.name(), name.c_str());
  } else if (result < 0) {
    // A network file system may have done the link and lost the answer; the link count knows.
    struct stat info {};
    if (files.status(directory, temporary.name(), &info) >= 0 && info.st_nlink == 2) result = 0;
  }
  if (result == -EEXIST) return Committed::kAlreadyThere;
  if (result < 0) return Status::from_errno(-result, "publish", tree_.full_path(name));
  return Committed::kNew;
}

Status StoreWriter::replace(const TemporaryFile& temporary, const std::string& name) {
  const auto tree = tree_.handle();
  if (tree == nullptr) return {StatusCode::kNotFound, "the store is gone"};
  const int directory = tree->directory();
  const int result =
      tree_.files().rename(directory, temporary.name(), directory, name.c_str(), /*replace=*/true);
  return result < 0 ? Status::from_errno(-result, "replace", tree_.full_path(name)) : Status::ok();
}

void StoreWriter::sync_parent(const std::string& name) {
  FileLayer& files = tree_.files();
  const auto tree = tree_.handle();
  if (tree == nullptr) return;
  const ScopedFd fd(
      files, files.open(tree->directory(), parent_of(name).c_str(), O_RDONLY | O_DIRECTORY, 0));
  if (fd.valid()) files.sync(fd.get());
}

Status StoreWriter::quarantine(const std::string& name) {
  FileLayer& files = tree_.files();
  const auto tree = tree_.handle();
  if (tree == nullptr) return {StatusCode::kNotFound, "the store is gone"};
  const int directory = tree->directory();
  const std::string leaf = name.substr(name.rfind('/') + 1);
  const std::string target = quarantine_file(new_temporary_name(false).random, leaf);
  const int result =
      files.rename(directory, name.c_str(), directory, target.c_str(), /*replace=*/true);
  if (result < 0) {
    struct stat info {};
    const bool gone = files.status(directory, name.c_str(), &info) == -ENOENT;
    if (gone) return {StatusCode::kNotFound, tree_.full_path(name) + " is not there"};
    // No place to put it: rather lose the evidence than keep the damage.
    if (!remove_tree(name)) {
      return Status::from_errno(-result, "quarantine", tree_.full_path(name));
    }
    return Status::ok();
  }
  // The rename kept the old time; age in quarantine counts from now.
  files.set_time(directory, target.c_str(), files.now());
  trim_quarantine();
  return Status::ok();
}

std::uint64_t StoreWriter::trim_quarantine() {
  FileLayer& files = tree_.files();
  const auto tree = tree_.handle();
  const auto names = tree_.list(kQuarantineDirectory);
  if (tree == nullptr || !names) return 0;
  std::vector<std::pair<std::int64_t, std::string>> kept;
  for (const std::string& leaf : names.value()) {
    std::string name = std::string(kQuarantineDirectory) + "/" + leaf;
    struct stat info {};
    if (files.status(tree->directory(), name.c_str(), &info) < 0) continue;
    kept.emplace_back(static_cast<std::int64_t>(info.st_mtim.tv_sec), std::move(name));
  }
  std::sort(kept.rbegin(), kept.rend());
  std::uint64_t removed = 0;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const bool old = files.now() - kept[i].first > kQuarantineSeconds;
    if ((i >= kMaxQuarantined || old) && remove_tree(kept[i].second)) ++removed;
  }
  return removed;
}

bool StoreWriter::remove_tree(const std::string& name) {
  const auto tree = tree_.handle();
  return tree != nullptr && remove_below(tree_.files(), tree->directory(), name, 0);
}

}  // namespace eagercache
