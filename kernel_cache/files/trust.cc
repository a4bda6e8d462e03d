#include "kernel_cache/files/trust.h"

#include <fcntl.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <string_view>
#include <utility>

namespace eagercache {
namespace {

constexpr mode_t kWritableByOthers = S_IWGRP | S_IWOTH;
constexpr int kMaxLinks = 16;
constexpr int kPathFlags = O_PATH | O_DIRECTORY;

Status refused(const std::string& path, const std::string& reason) {
  return {StatusCode::kRefused, path + " " + reason};
}

bool owner_is_trusted(uid_t owner) noexcept { return owner == 0 || owner == ::geteuid(); }

void push_front_components(std::string_view path, std::deque<std::string>& components) {
  std::deque<std::string> parts;
  while (!path.empty()) {
    const std::size_t end = path.find('/');
    const std::string_view part = path.substr(0, end);
    if (!part.empty() && part != ".") parts.emplace_back(part);
    path.remove_prefix(end == std::string_view::npos ? path.size() : end + 1);
  }
  components.insert(components.begin(), parts.begin(), parts.end());
}

// Walks one path. `walked_` is the path of `current_`, for messages.
class RootWalk {
 public:
  RootWalk(FileLayer& files, const TrustPolicy& policy, bool create)
      : files_(files), policy_(policy), create_(create) {}

  Result<OpenedRoot> run(const std::filesystem::path& path) {
    push_front_components(path.native(), pending_);
    if (pending_.empty())
      return refused(path.native(), "cannot be a store: it is the root directory");
    if (Status status = start_at_top(); !status) return status;
    while (!pending_.empty()) {
      const std::string name = std::move(pending_.front());
      pending_.pop_front();
      if (Status status = enter(name); !status) return status;
    }
    return OpenedRoot{std::move(current_), trusted_};
  }

 private:
  Status start_at_top() {
    ScopedFd top(files_, files_.open(AT_FDCWD, "/", kPathFlags, 0));
    if (!top.valid()) return Status::from_errno(-top.get(), "open", "/");
    current_ = std::move(top);
    walked_.clear();
    return check_directory(current_.get(), "/", FileRole::kAncestor);
  }

  Status enter(const std::string& name) {
    const std::string path = walked_ + "/" + name;
    ScopedFd next = open_component(name);
    if (next.get() == -ENOENT && create_) {
      if (Status status = make_private_directory(files_, current_.get(), name, path); !status) {
        return status;
      }
      next = open_component(name);
    }
    if (!next.valid()) return Status::from_errno(-next.get(), "open", path);

    struct stat info {};
    if (const int error = files_.status(next.get(), "", &info); error < 0) {
      return Status::from_errno(-error, "stat", path);
    }
    if (S_ISLNK(info.st_mode)) return follow(next.get(), info, path);
    const FileRole role = pending_.empty() ? FileRole::kDirectory : FileRole::kAncestor;
    current_ = std::move(next);
    walked_ = path;
    return check_info(info, path, role);
  }

  ScopedFd open_component(const std::string& name) {
    return {files_, files_.open(current_.get(), name.c_str(), O_PATH, 0)};
  }

  Status follow(int link, const struct stat& info, const std::string& path) {
    if (pending_.empty()) {
      return refused(path, "is a symbolic link; name the directory that it points to");
    }
    if (!owner_is_trusted(info.st_uid) && !policy_.allow_untrusted) {
      return refused(path, "is a symbolic link of user " + std::to_string(info.st_uid));
    }
    if (++links_ > kMaxLinks) return refused(path, "is one symbolic link too many");
    std::string target;
    if (const int error = files_.read_link(link, &target); error < 0) {
      return Status::from_errno(-error, "read link", path);
    }
    push_front_components(target, pending_);
    return target.starts_with('/') ? start_at_top() : Status::ok();
  }

  Status check_directory(int fd, const std::string& path, FileRole role) {
    struct stat info {};
    if (const int error = files_.status(fd, "", &info); error < 0) {
      return Status::from_errno(-error, "stat", path);
    }
    return check_info(info, path, role);
  }

  Status check_info(const struct stat& info, const std::string& path, FileRole role) {
    Status strict = check_trust(info, role, path, TrustPolicy{});
    if (strict.is_ok()) return strict;
    trusted_ = false;
    return check_trust(info, role, path, policy_);
  }

  FileLayer& files_;
  const TrustPolicy policy_;
  const bool create_;
  std::deque<std::string> pending_;
  ScopedFd current_;
  std::string walked_;
  int links_ = 0;
  bool trusted_ = true;
};

}  // namespace

Status check_process_privileges() {
  if (::getauxval(AT_SECURE) != 0 || ::geteuid() != ::getuid() || ::getegid() != ::getgid()) {
    return {StatusCode::kRefused,
            "this process has other rights than the user who started it; no store is used"};
  }
  return Status::ok();
}

Status check_trust(const struct stat& info, FileRole role, const std::string& path,
                   const TrustPolicy& policy) {
  if (role == FileRole::kFile && !S_ISREG(info.st_mode)) {
    return refused(path, "is not a regular file");
  }
  if (role != FileRole::kFile && !S_ISDIR(info.st_mode)) return refused(path, "is not a directory");
  if (policy.allow_untrusted) return Status::ok();
  if (!owner_is_trusted(info.st_uid)) {
    return refused(path, "belongs to user " + std::to_string(info.st_uid) + ", not to user " +
                             std::to_string(::geteuid()) + " or root; use a directory of your own");
  }
  if ((info.st_mode & kWritableByOthers) == 0) return Status::ok();
  if (role == FileRole::kAncestor && (info.st_mode & S_ISVTX) != 0) return Status::ok();
  return refused(path,
                 "may be written by other users, who may have left code in the store: delete that, "
                 "and run: chmod go-w '" +
                     path + "'");
}

Result<OpenedRoot> open_trusted_root(FileLayer& files, const std::filesystem::path& path,
                                     const TrustPolicy& policy, bool create) {
  return RootWalk(files, policy, create).run(path);
}

Status make_private_directory(FileLayer& files, int directory, const std::string& name,
                              const std::string& path) {
  const int made = files.make_directory(directory, name.c_str(), 0700);
  if (made == -EEXIST) return Status::ok();
  if (made < 0) return Status::from_errno(-made, "make directory", path);
  // The umask may have taken our own bits away.
  const int changed = files.set_mode(directory, name.c_str(), 0700);
  return changed < 0 ? Status::from_errno(-changed, "set mode of", path) : Status::ok();
}

}  // namespace eagercache
