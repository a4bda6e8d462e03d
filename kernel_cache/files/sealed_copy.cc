#include "kernel_cache/files/sealed_copy.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <string>

#include "kernel_cache/base/fork_guard.h"
#include "kernel_cache/files/file_layer.h"

namespace eagercache {
namespace {

// Descriptors of sealed copies by content. Guarded by process_mutex(); never closed, because the
// loader knows a library by its path, and the path has the descriptor's number in it.
std::map<Digest, int>& sealed_copies_locked() {
  static auto* const instance = new std::map<Digest, int>;
  return *instance;
}

// The descriptors are the process's, which needs most of them for other things.
std::size_t max_sealed_copies() {
  struct rlimit limit {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  return limit.rlim_cur / 4;
}

}  // namespace

Result<std::filesystem::path> sealed_copy(const Digest& digest, std::string_view bytes) {
  const auto path_of = [](int fd) {
    return std::filesystem::path("/proc/self/fd/" + std::to_string(fd));
  };
  {
    const std::scoped_lock lock(process_mutex());
    const auto known = sealed_copies_locked().find(digest);
    if (known != sealed_copies_locked().end()) return path_of(known->second);
    if (sealed_copies_locked().size() >= max_sealed_copies()) {
      return Status(StatusCode::kFull,
                    "copies of kernels in memory hold a quarter of the files "
                    "that this process may open");
    }
  }
  ScopedFd fd(FileLayer::posix(),
              ::memfd_create("eagercache-kernel", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Status::from_errno(errno, "create", "a file in memory");
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t moved =
        FileLayer::posix().write(fd.get(), bytes.data() + done, bytes.size() - done);
    if (moved <= 0)
      return Status::from_errno(static_cast<int>(-moved), "write", "a file in memory");
    done += static_cast<std::size_t>(moved);
  }
  constexpr int kSeals = F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    return Status::from_errno(errno, "seal", "a file in memory");
  }
  const std::scoped_lock lock(process_mutex());
  const auto [place, inserted] = sealed_copies_locked().emplace(digest, fd.get());
  if (inserted) fd.release();
  return path_of(place->second);
}

}  // namespace eagercache
