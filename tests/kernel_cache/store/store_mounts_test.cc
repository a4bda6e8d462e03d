// Real file systems that are full, have no inode left, are read-only, or run no code.
#include <sys/stat.h>

#include "tests/kernel_cache/store_fixture.h"
#include "tests/support/fault_file_layer.h"
#include "tests/support/mount_namespace.h"

namespace eagercache {
namespace {

class MountsTest : public StoreTest {
 protected:
  std::filesystem::path mount_point() const { return directory_.path() / "mount"; }

  StoreOptions mounted_options() const {
    StoreOptions result = options();
    result.root = mount_point() / "store";
    return result;
  }

  // `n` kernels of `size` bytes, until nothing more fits; then everything that was published must
  // still be whole, and after an eviction there must be room again. 0, or what went wrong.
  int fill(const char* limit, std::uint64_t n, std::size_t size) {
    std::filesystem::create_directory(mount_point());
    try_mount("tmpfs", mount_point(), "tmpfs", 0, limit);
    auto opened = DiskStore::open(mounted_options());
    if (!opened) return 1;
    DiskStore& store = *opened.value();
    std::uint64_t full = 0;
    for (std::uint64_t i = 0; i < n; ++i) {
      const std::filesystem::path source = directory_.path() / "padded.so";
      write_bytes(source, answer_object(i) + std::string(size, 'x'));
      const auto published =
          store.publish(entry_of(i, EntryKind::kKernel), {{ObjectKind::kSharedObject, source}});
      if (published) continue;
      if (published.code() != StatusCode::kFull) return 2;
      ++full;
    }
    if (full == 0) return 3;
    // A store on a full device is opened, and is no read-only one.
    auto again = DiskStore::open(mounted_options());
    if (!again || again.value()->read_only()) return 4;
    std::uint64_t sound = 0;
    for (std::uint64_t i = 0; i < n; ++i) {
      const auto found = again.value()->find(key_of(i));
      if (!found && found.code() == StatusCode::kNotFound) continue;
      if (!found || !again.value()->verified_shared_object(found.value(), 0)) return 5;
      ++sound;
    }
    if (sound == 0 || store.quarantined() + again.value()->quarantined() != 0) return 6;
    if (count_files(mounted_options().root / "v1" / "t") != 0) return 7;
    if (!again.value()->evict(true)) return 8;
    const auto published = publish_kernel(*again.value(), n);
    return published && check(*again.value(), n) ? 0 : 9;
  }
};

TEST_F(MountsTest, AFullDeviceLosesNothingAndServesOn) {
  EAGERCACHE_EXPECT_WITH_MOUNTS(run_with_mounts([&] { return fill("size=1m", 200, 20'000); }));
}

TEST_F(MountsTest, ADeviceWithoutInodesLosesNothingAndServesOn) {
  EAGERCACHE_EXPECT_WITH_MOUNTS(
      run_with_mounts([&] { return fill("size=64m,nr_inodes=100", 200, 0); }));
}

// No byte of room and no inode from the start: no store, and one that is there is read.
TEST_F(MountsTest, ADeviceThatWasAlwaysFullIsNoStore) {
  EAGERCACHE_EXPECT_WITH_MOUNTS(run_with_mounts([&] {
    std::filesystem::create_directory(mount_point());
    try_mount("tmpfs", mount_point(), "tmpfs", 0, "nr_inodes=3");
    const auto store = DiskStore::open(mounted_options());
    return !store && store.code() == StatusCode::kFull ? 0 : 1;
  }));
}

TEST_F(MountsTest, AMountThatRunsNoCodeIsServedFromMemory) {
  EAGERCACHE_EXPECT_WITH_MOUNTS(run_with_mounts([&] {
    std::filesystem::create_directory(mount_point());
    try_mount("tmpfs", mount_point(), "tmpfs", MS_NOEXEC, "size=8m");
    auto opened = DiskStore::open(mounted_options());
    if (!opened || !opened.value()->untrusted_roots().empty()) return 1;
    DiskStore& store = *opened.value();
    for (std::uint64_t n = 1; n <= 3; ++n) {
      if (!publish_kernel(store, n)) return 2;
      const auto answer = use(store, n);
      if (!answer || answer.value() != n) return 3;
    }
    // By path it would have failed.
    const auto path = mounted_options().root / "v1" /
                      object_file(ObjectKind::kSharedObject, sha256(answer_object(1)));
    return SharedLibrary::open(path) ? 4 : 0;
  }));
}

TEST_F(MountsTest, AReadOnlyMountIsReadWithoutOneCallThatWrites) {
  ASSERT_TRUE(publish_kernel(*open(), 1));
  EAGERCACHE_EXPECT_WITH_MOUNTS(run_with_mounts([&] {
    try_mount(root().c_str(), root(), nullptr, MS_BIND, nullptr);
    try_mount(nullptr, root(), nullptr, MS_BIND | MS_REMOUNT | MS_RDONLY, nullptr);
    FaultFileLayer files;
    StoreOptions counted = options();
    counted.files = &files;
    auto opened = DiskStore::open(counted);
    if (!opened || !opened.value()->read_only()) return 1;
    DiskStore& store = *opened.value();
    const auto answer = use(store, 1);
    if (!answer || answer.value() != 1) return 2;
    if (!store.check_attempts(key_of(1))) return 3;
    if (publish_kernel(store, 2).code() != StatusCode::kRefused) return 4;
    if (store.find(key_of(2)).code() != StatusCode::kNotFound) return 5;
    return files.changes() == 0 ? 0 : 6;
  }));
}

// A local store beside a read-only image layer, which is copied in.
TEST_F(MountsTest, AReadOnlyTierIsCopiedInWithoutOneCallThatWritesThere) {
  StoreOptions layer = options();
  layer.root = directory_.path() / "layer";
  ASSERT_TRUE(publish_kernel(*open(layer), 1));
  EAGERCACHE_EXPECT_WITH_MOUNTS(run_with_mounts([&] {
    try_mount(layer.root.c_str(), layer.root, nullptr, MS_BIND, nullptr);
    try_mount(nullptr, layer.root, nullptr, MS_BIND | MS_REMOUNT | MS_RDONLY, nullptr);
    StoreOptions both = options();
    both.tiers = {layer.root};
    auto opened = DiskStore::open(both);
    if (!opened || !opened.value()->tier_problems().empty()) return 1;
    const auto answer = use(*opened.value(), 1);
    if (!answer || answer.value() != 1) return 2;
    return std::filesystem::exists(object_path(1)) ? 0 : 3;
  }));
}

}  // namespace
}  // namespace eagercache
