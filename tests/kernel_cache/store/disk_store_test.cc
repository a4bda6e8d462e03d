#include "kernel_cache/store/disk_store.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "kernel_cache/base/cpu_features.h"
#include "tests/kernel_cache/store_fixture.h"
#include "tests/support/child_process.h"
#include "tests/support/fault_file_layer.h"

namespace eagercache {
namespace {

using Clock = std::chrono::steady_clock;

TEST_F(StoreTest, APublishedKernelIsFoundVerifiedLoadedAndRight) {
  const auto store = open();
  EXPECT_EQ(store->find(key_of(1)).code(), StatusCode::kNotFound);
  const auto published = publish_kernel(*store, 1);
  ASSERT_TRUE(published) << published.status().to_string();
  const auto found = store->find(key_of(1));
  ASSERT_TRUE(found) << found.status().to_string();
  EXPECT_EQ(found.value(), published.value());
  EXPECT_EQ(found->facts.at("number"), "1");
  EXPECT_EQ(found->objects.at(0).size, answer_object(1).size());
  EXPECT_EQ(use(*store, 1).value(), 1U);
}

TEST_F(StoreTest, ASecondProcessAndACopiedStoreHit) {
  ASSERT_TRUE(publish_kernel(*open(), 1));
  EXPECT_EQ(run_in_child([&] {
              const auto result = use(*open(), 1);
              return result && result.value() == 1 ? 0 : 1;
            }),
            0);
  StoreOptions copied = options();
  copied.root = directory_.path() / "elsewhere";
  std::filesystem::copy(root(), copied.root, std::filesystem::copy_options::recursive);
  // What the copy's umask may have widened, a user's own chmod mends.
  for (const auto& entry : std::filesystem::recursive_directory_iterator(copied.root)) {
    std::filesystem::permissions(
        entry.path(), std::filesystem::perms::group_write | std::filesystem::perms::others_write,
        std::filesystem::perm_options::remove);
  }
  EXPECT_EQ(use(*open(copied), 1).value(), 1U);
}

TEST_F(StoreTest, TheFirstPublishedEntryStays) {
  const auto store = open();
  ASSERT_TRUE(publish_kernel(*store, 1));
  Manifest late = entry_of(1, EntryKind::kKernel);
  late.facts["late"] = "yes";
  const auto second = store->publish(late, {{ObjectKind::kSharedObject, source_of(2)}});
  ASSERT_TRUE(second) << second.status().to_string();
  EXPECT_FALSE(second->facts.contains("late"));
  EXPECT_EQ(use(*store, 1).value(), 1U);
}

TEST_F(StoreTest, PublishedFilesAreImmutableAndTheSourceIsLeftAlone) {
  const auto store = open();
  const auto source = source_of(1);
  ASSERT_TRUE(publish_kernel(*store, 1));
  for (const auto& path : {manifest_path(1), object_path(1)}) {
    struct stat info {};
    ASSERT_EQ(::stat(path.c_str(), &info), 0) << path;
    EXPECT_EQ(info.st_mode & 07777, 0444U);
    EXPECT_EQ(info.st_nlink, 1U);
  }
  EXPECT_EQ(read_bytes(source), answer_object(1));
  EXPECT_EQ(count_files(inside("t")), 0U);
}

TEST_F(StoreTest, KernelsWithSeveralObjectsAndSharedObjectsAreStoredOnce) {
  const auto store = open();
  const auto cubin = directory_.path() / "kernel.cubin";
  write_bytes(cubin, "machine code of another machine");
  for (const std::uint64_t n : {1, 2}) {
    ASSERT_TRUE(
        store->publish(entry_of(n, EntryKind::kKernel),
                       {{ObjectKind::kSharedObject, source_of(7)}, {ObjectKind::kCubin, cubin}}));
  }
  const auto found = store->find(key_of(2));
  ASSERT_TRUE(found);
  EXPECT_EQ(store->read_object(found.value(), 1).value(), read_bytes(cubin));
  EXPECT_EQ(store->read_object(found.value(), 2).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store->verified_shared_object(found.value(), 1).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(use(*store, 1).value(), 7U);
  EXPECT_EQ(count_files(inside("o")), 2U);
}

TEST_F(StoreTest, DecisionsAreStoredWithoutObjects) {
  const auto store = open();
  ASSERT_TRUE(store->publish(entry_of(1, EntryKind::kNative), {}));
  const auto found = store->find(key_of(1));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, EntryKind::kNative);
  EXPECT_TRUE(found->objects.empty());
}

TEST_F(StoreTest, MeaninglessPublishesAreTheCallersMistake) {
  const auto store = open();
  const auto code = [&](Manifest manifest, std::vector<ObjectSource> sources) {
    return store->publish(std::move(manifest), sources).code();
  };
  const auto mistake = StatusCode::kInvalidArgument;
  EXPECT_EQ(code(entry_of(1, EntryKind::kKernel), {}), mistake);
  EXPECT_EQ(code(entry_of(1, EntryKind::kNative), {{ObjectKind::kSharedObject, source_of(1)}}),
            mistake);
  EXPECT_EQ(code(entry_of(1, EntryKind::kKernel), {{ObjectKind::kCubin, "/nowhere/x.cubin"}}),
            mistake);
  EXPECT_EQ(code(entry_of(1, EntryKind::kKernel), {{ObjectKind::kCubin, "/dev/zero"}}), mistake);
  Manifest bad_name = entry_of(1, EntryKind::kNative);
  bad_name.facts["Not A Name"] = "";
  EXPECT_EQ(code(bad_name, {}), mistake);
  EXPECT_EQ(count_files(inside("t")), 0U);
  EXPECT_EQ(count_files(inside("o")), 0U);
}

TEST_F(StoreTest, AnUnfitSharedObjectIsNotPublished) {
  const auto store = open();
  for (const char* name : {"object_static_tls", "object_runpath", "object_needs_stranger"}) {
    const auto result = store->publish(entry_of(1, EntryKind::kKernel),
                                       {{ObjectKind::kSharedObject, test_object(name)}});
    EXPECT_EQ(result.code(), StatusCode::kIncompatible) << name;
  }
  EXPECT_EQ(store->find(key_of(1)).code(), StatusCode::kNotFound);
}

TEST_F(StoreTest, AKernelForAnotherCpuIsRefusedBeforeItIsReadAndStays) {
  FaultFileLayer files;
  StoreOptions counted = options();
  counted.files = &files;
  const auto store = open(counted);
  for (const char* feature : {"avx512f", "avx512_bf16", "amx_tile", "no_such_feature"}) {
    const auto& host = host_cpu_features();
    if (std::find(host.begin(), host.end(), feature) != host.end()) continue;
    Manifest manifest = entry_of(1, EntryKind::kKernel);
    manifest.key = sha256(feature);
    manifest.cpu_features = {"sse2", feature};
    ASSERT_TRUE(store->publish(manifest, {{ObjectKind::kSharedObject, source_of(1)}}));
    const auto found = store->find(manifest.key);
    ASSERT_TRUE(found);
    const std::uint64_t before = files.calls();
    const auto refused = store->verified_shared_object(found.value(), 0);
    EXPECT_EQ(refused.code(), StatusCode::kIncompatible);
    EXPECT_NE(refused.status().message().find(feature), std::string::npos);
    EXPECT_EQ(files.calls(), before);
    EXPECT_TRUE(store->find(manifest.key));
  }
  EXPECT_EQ(store->quarantined(), 0U);
}

TEST_F(StoreTest, DifferentEnvironmentsNeverMeet) {
  StoreOptions other = options();
  other.environment = "torch: 2.15.0\ncompiler: fake 1\n";
  const auto ours = open();
  const auto theirs = open(other);
  ASSERT_NE(ours->environment_id(), theirs->environment_id());
  ASSERT_TRUE(publish_kernel(*ours, 1));
  EXPECT_EQ(theirs->find(key_of(1)).code(), StatusCode::kNotFound);
  Manifest manifest = entry_of(1, EntryKind::kKernel);
  ASSERT_TRUE(theirs->publish(manifest, {{ObjectKind::kSharedObject, source_of(2)}}));
  EXPECT_EQ(use(*ours, 1).value(), 1U);
  EXPECT_EQ(use(*theirs, 1).value(), 2U);
  EXPECT_EQ(read_bytes(inside(environment_file(theirs->environment_id()))), other.environment);
  ASSERT_TRUE(ours->remove(key_of(1)));
  EXPECT_EQ(use(*theirs, 1).value(), 2U);
}

TEST_F(StoreTest, ListingShowsOneEnvironmentOrAll) {
  StoreOptions other = options();
  other.environment = "another";
  const auto ours = open();
  const auto theirs = open(other);
  ASSERT_TRUE(publish_kernel(*ours, 1));
  ASSERT_TRUE(ours->publish(entry_of(2, EntryKind::kNative), {}));
  ASSERT_TRUE(publish_kernel(*theirs, 3));
  const auto names = [&](bool all) {
    std::set<std::string> result;
    EXPECT_TRUE(ours->for_each(all, [&](const EntryInfo& entry) {
      result.insert(entry.environment + " " + entry.manifest.facts.at("number"));
      const bool kernel = entry.manifest.kind == EntryKind::kKernel;
      EXPECT_GT(entry.bytes, kernel ? answer_object(1).size() : 0U);
      EXPECT_GT(entry.last_used, 0);
    }));
    return result;
  };
  const std::string a = ours->environment_id();
  const std::string b = theirs->environment_id();
  EXPECT_EQ(names(false), (std::set<std::string>{a + " 1", a + " 2"}));
  EXPECT_EQ(names(true), (std::set<std::string>{a + " 1", a + " 2", b + " 3"}));
}

TEST_F(StoreTest, RemovedEntriesAreMisses) {
  const auto store = open();
  EXPECT_EQ(store->remove(key_of(1)).code(), StatusCode::kNotFound);
  ASSERT_TRUE(publish_kernel(*store, 1));
  EXPECT_TRUE(store->remove(key_of(1)));
  EXPECT_EQ(store->find(key_of(1)).code(), StatusCode::kNotFound);
  ASSERT_TRUE(publish_kernel(*store, 1));
  EXPECT_EQ(use(*store, 1).value(), 1U);
}

TEST_F(StoreTest, WorkDirectoriesArePrivateAndFresh) {
  const auto store = open();
  const auto first = store->make_work_directory();
  const auto second = store->make_work_directory();
  ASSERT_TRUE(first);
  ASSERT_TRUE(second);
  EXPECT_NE(first.value(), second.value());
  struct stat info {};
  ASSERT_EQ(::stat(first->c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700U);
}

TEST_F(StoreTest, TheCompileLockExcludesOtherStoresOfTheSameKey) {
  const auto one = open();
  const auto two = open();
  auto lock = one->try_lock(key_of(1));
  ASSERT_TRUE(lock) << lock.status().to_string();
  EXPECT_EQ(two->try_lock(key_of(1)).code(), StatusCode::kBusy);
  lock->release();
  EXPECT_TRUE(two->try_lock(key_of(1)));
}

TEST_F(StoreTest, AnUnusableUmaskDoesNotSpoilTheStore) {
  for (const mode_t mask : {0000U, 0077U, 0777U}) {
    const mode_t before = ::umask(mask);
    std::filesystem::remove_all(root());
    const auto store = open();
    const bool published = store != nullptr && publish_kernel(*store, mask).is_ok();
    ::umask(before);
    EXPECT_TRUE(published) << std::oct << mask;
    struct stat info {};
    ASSERT_EQ(::stat(inside("o").c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07777, 0700U);
    EXPECT_EQ(use(*open(), mask).value(), mask);
  }
}

TEST_F(StoreTest, OddRootNamesWork) {
  for (const std::string& name :
       {std::string("with space"), std::string("\xc3\xbcn\xc3\xaf"), std::string(250, 'x')}) {
    StoreOptions odd = options();
    odd.root = directory_.path() / name;
    const auto store = open(odd);
    ASSERT_NE(store, nullptr);
    ASSERT_TRUE(publish_kernel(*store, 5));
    EXPECT_EQ(use(*store, 5).value(), 5U);
  }
}

TEST_F(StoreTest, ADeletedStoreIsAMissAndThePublisherMakesItAnew) {
  const auto writer = open();
  const auto reader = open();
  ASSERT_TRUE(publish_kernel(*writer, 1));
  std::filesystem::remove_all(root());
  EXPECT_EQ(writer->find(key_of(1)).code(), StatusCode::kNotFound);
  const auto again = publish_kernel(*writer, 2);
  ASSERT_TRUE(again) << again.status().to_string();
  EXPECT_EQ(use(*writer, 2).value(), 2U);
  // The other one looks for a new store after a miss, at most once a second.
  const auto start = Clock::now();
  while (!reader->find(key_of(2)) && Clock::now() - start < std::chrono::seconds(60)) {
  }
  EXPECT_EQ(use(*reader, 2).value(), 2U);
}

TEST_F(StoreTest, ADeletedPartOfTheStoreIsMadeAnew) {
  const auto store = open();
  for (const char* part : {"t", "o", "q", "l"}) {
    std::filesystem::remove_all(inside(part));
    const auto published = publish_kernel(*store, static_cast<std::uint64_t>(part[0]));
    EXPECT_TRUE(published) << part << ": " << published.status().to_string();
  }
}

TEST_F(StoreTest, OpeningReadsNoEntryHoweverManyThereAre) {
  const auto opening_calls = [&] {
    FaultFileLayer files;
    StoreOptions counted = options();
    counted.files = &files;
    const auto store = open(counted);
    return files.calls();
  };
  open();
  const std::uint64_t empty = opening_calls();
  {
    FaultFileLayer files;
    files.set_sync_enabled(false);
    StoreOptions fast = options();
    fast.files = &files;
    const auto store = open(fast);
    for (std::uint64_t n = 0; n < 1000; ++n) {
      ASSERT_TRUE(store->publish(entry_of(n, EntryKind::kNative), {}));
    }
  }
  EXPECT_EQ(opening_calls(), empty);
}

TEST_F(StoreTest, AWarmMissIsTwoOpensAndAHitIsOneFileRead) {
  FaultFileLayer files;
  StoreOptions counted = options();
  counted.files = &files;
  const auto store = open(counted);
  ASSERT_TRUE(publish_kernel(*store, 1));
  Digest neighbour = key_of(1);
  neighbour.bytes[31] ^= 1;
  ASSERT_TRUE(store->find(key_of(1)));
  EXPECT_FALSE(store->find(neighbour));
  files.clear_faults();
  ASSERT_TRUE(store->find(key_of(1)));
  EXPECT_LE(files.calls(), 5U);  // open, stat, read, read (the end), close
  files.clear_faults();
  EXPECT_FALSE(store->find(neighbour));
  EXPECT_LE(files.calls(), 2U);
}

TEST_F(StoreTest, NoDescriptorIsLeftOpen) {
  const auto open_files = [] {
    std::size_t count = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator("/proc/self/fd")) {
      ++count;
    }
    return count;
  };
  const std::size_t before = open_files();
  {
    const auto store = open();
    const std::size_t with_store = open_files();
    for (std::uint64_t n = 0; n < 20; ++n) {
      ASSERT_TRUE(publish_kernel(*store, n));
      ASSERT_TRUE(check(*store, n));
      { ASSERT_TRUE(store->try_lock(key_of(n))); }
      ASSERT_TRUE(store->evict(true));
    }
    EXPECT_EQ(open_files(), with_store);
  }
  EXPECT_EQ(open_files(), before);
}

}  // namespace
}  // namespace eagercache
