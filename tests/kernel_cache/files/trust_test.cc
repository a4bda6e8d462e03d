#include "kernel_cache/files/trust.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/kernel_cache/store_fixture.h"
#include "tests/support/child_process.h"
#include "tests/support/fault_file_layer.h"

namespace eagercache {
namespace {

constexpr uid_t kStranger = 12345;

class TrustTest : public StoreTest {
 protected:
  TrustTest() { published_ = publish_kernel(*open(), 1).is_ok(); }

  // Opening is refused, names the component, and opens nothing of that component's content.
  void expect_refused(const std::filesystem::path& component) {
    ASSERT_TRUE(published_);
    FaultFileLayer files;
    files.set_recording(true);
    StoreOptions watched = options();
    watched.files = &files;
    const auto store = DiskStore::open(watched);
    ASSERT_FALSE(store) << component;
    EXPECT_EQ(store.code(), StatusCode::kRefused) << store.status().to_string();
    EXPECT_NE(store.status().message().find(component.native()), std::string::npos)
        << store.status().to_string();
    EXPECT_EQ(files.changes(), 0U);
    EXPECT_FALSE(files.opened_names().empty());
    for (const std::string& name : files.opened_names()) {
      EXPECT_EQ(name.find("ENV"), std::string::npos);
      EXPECT_EQ(name.find("/m/"), std::string::npos);
    }
  }

  void chmod(const std::filesystem::path& path, mode_t mode) {
    ASSERT_EQ(::chmod(path.c_str(), mode), 0) << path;
  }

  bool published_ = false;
};

TEST_F(TrustTest, DirectoriesThatOthersMayWriteAreRefused) {
  for (const std::filesystem::path& path :
       {root(), inside(""), inside("o"), inside("t"), inside("l"), inside("q"),
        inside(environment()), inside(environment() + "/m"), inside(environment() + "/n")}) {
    const std::string name = path.native().ends_with('/')
                                 ? path.native().substr(0, path.native().size() - 1)
                                 : path.native();
    for (const mode_t mode : {0770, 0720, 0707, 0702, 01777}) {
      chmod(name, mode);
      expect_refused(name);
    }
    chmod(name, 0755);
    EXPECT_TRUE(DiskStore::open(options())) << name;
  }
}

TEST_F(TrustTest, AParentThatAllMayWriteIsRefusedUnlessSticky) {
  chmod(directory_.path(), 0777);
  expect_refused(directory_.path());
  chmod(directory_.path(), 0770);
  expect_refused(directory_.path());
  chmod(directory_.path(), 01777);
  EXPECT_TRUE(DiskStore::open(options()));
}

TEST_F(TrustTest, ASymbolicLinkIsNotARoot) {
  const auto real = directory_.path() / "real";
  std::filesystem::rename(root(), real);
  std::filesystem::create_symlink(real, root());
  expect_refused(root());
}

TEST_F(TrustTest, OurOwnLinkInTheParentIsFollowed) {
  const auto link = directory_.path() / "link";
  std::filesystem::create_symlink(".", link);
  StoreOptions linked = options();
  linked.root = link / "store";
  const auto store = open(linked);
  EXPECT_EQ(use(*store, 1).value(), 1U);
  std::filesystem::create_symlink("round", directory_.path() / "round");
  linked.root = directory_.path() / "round" / "store";
  EXPECT_EQ(DiskStore::open(linked).code(), StatusCode::kRefused);
}

TEST_F(TrustTest, AFileOrPipeInPlaceOfADirectoryIsRefused) {
  for (const std::string& name : {std::string("o"), environment() + "/m"}) {
    std::filesystem::remove_all(inside(name));
    write_bytes(inside(name), "");
    expect_refused(inside(name));
    std::filesystem::remove(inside(name));
    ASSERT_EQ(::mkfifo(inside(name).c_str(), 0600), 0);
    expect_refused(inside(name));
    std::filesystem::remove(inside(name));
    std::filesystem::create_symlink("/tmp", inside(name));
    expect_refused(inside(name));
    std::filesystem::remove(inside(name));
  }
}

TEST_F(TrustTest, ForeignOwnersAreRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "giving files away needs root";
  for (const std::filesystem::path& path :
       {directory_.path(), root(), root() / "v1", inside("o"), inside(environment())}) {
    ASSERT_EQ(::lchown(path.c_str(), kStranger, kStranger), 0);
    expect_refused(path);
    ASSERT_EQ(::lchown(path.c_str(), 0, 0), 0);
  }
  // A link of a stranger in the parent path.
  const auto link = directory_.path() / "link";
  std::filesystem::create_symlink(".", link);
  ASSERT_EQ(::lchown(link.c_str(), kStranger, kStranger), 0);
  StoreOptions linked = options();
  linked.root = link / "store";
  EXPECT_EQ(DiskStore::open(linked).code(), StatusCode::kRefused);
}

TEST_F(TrustTest, AnotherUsersStoreIsRefusedAndRootsIsReadOnly) {
  if (::geteuid() != 0) GTEST_SKIP() << "changing the user needs root";
  ASSERT_TRUE(published_);
  chmod(directory_.path(), 0755);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root())) {
    if (entry.is_directory()) chmod(entry.path(), 0755);
  }
  chmod(root(), 0755);
  const auto as_user = [&](uid_t user, auto body) {
    return run_in_child([&] {
      if (::setgid(user) != 0 || ::setuid(user) != 0) return 100;
      return body();
    });
  };
  // Root's files may be trusted by everybody, and written by root alone.
  EXPECT_EQ(as_user(kStranger,
                    [&] {
                      auto store = DiskStore::open(options());
                      if (!store) return 1;
                      const auto answer = use(*store.value(), 1);
                      if (!answer || answer.value() != 1) return 2;
                      return store.value()->try_lock(key_of(1)) ? 3 : 0;
                    }),
            0);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_.path())) {
    ASSERT_EQ(::lchown(entry.path().c_str(), kStranger, kStranger), 0);
  }
  EXPECT_EQ(
      as_user(kStranger + 1,
              [&] { return DiskStore::open(options()).code() == StatusCode::kRefused ? 0 : 1; }),
      0);
  expect_refused(root());
}

TEST_F(TrustTest, AProcessWithMoreRightsThanItsUserUsesNoStore) {
  if (::geteuid() != 0) GTEST_SKIP() << "changing the user needs root";
  EXPECT_EQ(run_in_child([&] {
              if (::setresuid(kStranger, 0, 0) != 0) return 1;
              StoreOptions trusting = options();
              trusting.allow_untrusted = true;
              if (DiskStore::open(options()).code() != StatusCode::kRefused) return 2;
              return DiskStore::open(trusting).code() == StatusCode::kRefused ? 0 : 3;
            }),
            0);
}

// Each thing in place of a manifest, then of an object: refused without blocking, put aside, and
// made anew by the next publish.
TEST_F(TrustTest, ThingsThatAreNoFilesOfOursAreRefusedAndReplaced) {
  const auto outside = directory_.path() / "outside";
  using Plant = void (*)(const std::filesystem::path&, const std::filesystem::path&);
  const std::vector<std::pair<const char*, Plant>> plants{
      {"pipe", [](const auto& path, const auto&) { ::mkfifo(path.c_str(), 0600); }},
      {"link to the same content",
       [](const auto& path, const auto& copy) { std::filesystem::create_symlink(copy, path); }},
      {"directory", [](const auto& path, const auto&) { std::filesystem::create_directory(path); }},
      {"group-writable file",
       [](const auto& path, const auto& copy) {
         std::filesystem::copy_file(copy, path);
         ::chmod(path.c_str(), 0664);
       }},
      {"device",
       [](const auto& path, const auto&) { ::mknod(path.c_str(), S_IFCHR | 0600, makedev(1, 5)); }},
      {"stranger's file",
       [](const auto& path, const auto& copy) {
         std::filesystem::copy_file(copy, path);
         if (::chown(path.c_str(), kStranger, kStranger) != 0) std::filesystem::remove(path);
       }},
  };
  const auto store = open();
  for (const auto& path : {manifest_path(1), object_path(1)}) {
    for (const auto& [name, plant] : plants) {
      std::filesystem::remove_all(outside);
      std::filesystem::copy_file(path, outside);
      std::filesystem::remove(path);
      plant(path, outside);
      if (!std::filesystem::exists(std::filesystem::symlink_status(path))) continue;  // needs root
      const std::uint64_t before = store->quarantined();
      EXPECT_FALSE(check(*store, 1)) << name << " at " << path;
      EXPECT_GT(store->quarantined(), before) << name;
      EXPECT_EQ(store->find(key_of(1)).code(), StatusCode::kNotFound) << name;
      const auto published = publish_kernel(*store, 1);
      ASSERT_TRUE(published) << name << ": " << published.status().to_string();
      EXPECT_TRUE(check(*store, 1)) << name;
      EXPECT_TRUE(std::filesystem::exists(outside)) << name << ": touched a file outside";
    }
  }
}

TEST_F(TrustTest, AFanOutDirectoryThatOthersMayWriteIsRefused) {
  chmod(manifest_path(1).parent_path(), 0777);
  EXPECT_EQ(open()->find(key_of(1)).code(), StatusCode::kRefused);
  chmod(manifest_path(1).parent_path(), 0700);
  chmod(object_path(1).parent_path(), 0777);
  EXPECT_EQ(check(*open(), 1).code(), StatusCode::kRefused);
}

// The name of an object changes its nature as fast as one thread can make it. Whatever is loaded,
// was the right content.
TEST_F(TrustTest, SwappingWhileItIsCheckedNeverBlocksAndNeverDeceives) {
  ASSERT_TRUE(published_);
  const auto evil = directory_.path() / "evil.so";
  write_bytes(evil, answer_object(666));
  const std::string good = answer_object(1);
  std::atomic<bool> done{false};
  std::thread attacker([&] {
    for (unsigned int round = 0; !done; ++round) {
      const auto path = object_path(1);
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
      std::filesystem::create_directories(path.parent_path(), ignored);
      switch (round % 4) {
        case 0:
          ::mkfifo(path.c_str(), 0600);
          break;
        case 1:
          std::filesystem::create_symlink(evil, path, ignored);
          break;
        case 2:
          std::filesystem::copy_file(evil, path, ignored);
          break;
        default:
          std::ofstream(path) << good;
      }
    }
  });
  // Read-only, so that nothing is put aside and every round meets the attacker.
  StoreOptions reading = options();
  reading.read_only = true;
  const auto start = std::chrono::steady_clock::now();
  const auto passed = [&](int seconds) {
    return std::chrono::steady_clock::now() - start > std::chrono::seconds(seconds);
  };
  std::size_t good_reads = 0;
  std::size_t refusals = 0;
  // A second, and longer while the attacker did not get his chances.
  while (!passed(1) || (!passed(60) && (refusals < 50 || good_reads < 1))) {
    const auto store = open(reading);
    const auto found = store->find(key_of(1));
    ASSERT_TRUE(found) << found.status().to_string();
    const auto bytes = store->read_object(found.value(), 0);
    if (bytes) {
      ASSERT_EQ(bytes.value(), good);
      ++good_reads;
    } else {
      ++refusals;
    }
  }
  done = true;
  attacker.join();
  EXPECT_GE(refusals, 50U);
  EXPECT_GE(good_reads, 1U);
}

}  // namespace
}  // namespace eagercache
