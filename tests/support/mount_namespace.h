#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <string>

#include "tests/support/child_process.h"

namespace eagercache {

// Enters a mount namespace of this process's own, as root of a user namespace where we are not root
// anyway. False where the machine does not allow it.
inline bool enter_mount_namespace() {
  const uid_t user = ::geteuid();
  const gid_t group = ::getegid();
  if (::unshare(CLONE_NEWNS) != 0) {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    const auto put = [](const char* path, const std::string& text) {
      const int fd = ::open(path, O_WRONLY | O_CLOEXEC);
      const bool done =
          fd >= 0 && ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
      if (fd >= 0) ::close(fd);
      return done;
    };
    if (!put("/proc/self/setgroups", "deny") ||
        !put("/proc/self/uid_map", "0 " + std::to_string(user) + " 1") ||
        !put("/proc/self/gid_map", "0 " + std::to_string(group) + " 1")) {
      return false;
    }
  }
  return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

inline constexpr int kMountsNotAllowed = 77;

// Runs `body` (returning an int, 0 for success) in a child with a mount namespace of its own, whose
// mounts end with it. The body mounts by try_mount, which ends the child with kMountsNotAllowed.
template <typename Body>
int run_with_mounts(Body body) {
  return run_in_child(
      [&] {
        if (!enter_mount_namespace()) return kMountsNotAllowed;
        return body();
      },
      120);
}

inline void try_mount(const char* source, const std::string& target, const char* type,
                      unsigned long flags, const char* data) {
  if (::mount(source, target.c_str(), type, flags, data) != 0) ::_exit(kMountsNotAllowed);
}

}  // namespace eagercache

// Fails unless the child succeeded; says that the test did not run where mounting is not allowed.
#define EAGERCACHE_EXPECT_WITH_MOUNTS(result)                                      \
  do {                                                                             \
    const int mounts_result = (result);                                            \
    if (mounts_result == ::eagercache::kMountsNotAllowed) {                        \
      GTEST_SKIP() << "NOT RUN: this machine does not let us mount a file system"; \
    }                                                                              \
    EXPECT_EQ(mounts_result, 0);                                                   \
  } while (false)
