#pragma once

#include <filesystem>
#include <string>

#include "kernel_cache/base/status.h"
#include "kernel_cache/files/file_layer.h"

namespace eagercache {

// Who may have written what we are about to load as code. In scope: other local users, and members
// of a group with write access. Out of scope: root and our own user id.

// kRefused in a process with more rights than its user (set-user-id, file capabilities): such a
// process must not load code from a place that the user names.
Status check_process_privileges();

struct TrustPolicy {
  // Accept owners and modes that the rules refuse. File types are checked all the same.
  bool allow_untrusted = false;
};

enum class FileRole {
  kAncestor,   // a directory above the store: may be writable by all when it is sticky
  kDirectory,  // the store's root, and directories below
  kFile,       // a regular file below
};

// kRefused, with the component and the remedy, unless the type fits the role and the file belongs
// to root or the effective user and is writable by nobody else.
Status check_trust(const struct stat& info, FileRole role, const std::string& path,
                   const TrustPolicy& policy);

// The folder that everything below is opened relative to, so that nobody can put another into its
// place.
struct OpenedRoot {
  ScopedFd directory;   // O_PATH: good for *at() calls only
  bool trusted = true;  // false: another user may write it, and the policy let that pass
};

// Opens `path` component by component, each checked after it was opened and never looked up again.
// Symbolic links of root or the effective user are followed in ancestors; the last component must
// be a directory itself. With `create`, missing components are made with mode 0700. kNotFound when
// a component is missing.
Result<OpenedRoot> open_trusted_root(FileLayer& files, const std::filesystem::path& path,
                                     const TrustPolicy& policy, bool create);

// Makes `name` (mode 0700, whatever the umask) unless it is there.
Status make_private_directory(FileLayer& files, int directory, const std::string& name,
                              const std::string& path);

}  // namespace eagercache
