#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernel_cache/format/file_names.h"
#include "kernel_cache/loading/shared_library.h"
#include "kernel_cache/store/disk_store.h"
#include "tests/kernel_cache/test_objects.h"
#include "tests/support/temporary_directory.h"

namespace eagercache {

inline Digest key_of(std::uint64_t number) { return sha256("key " + std::to_string(number)); }

inline Manifest entry_of(std::uint64_t number, EntryKind kind) {
  Manifest manifest;
  manifest.key = key_of(number);
  manifest.kind = kind;
  manifest.created = 1'700'000'000;
  manifest.facts["number"] = std::to_string(number);
  return manifest;
}

// A store in a directory of its own, and the verbs of its tests. Kernel `n` has key_of(n) and
// answers n.
class StoreTest : public testing::Test {
 protected:
  std::filesystem::path root() const { return directory_.path() / "store"; }
  std::filesystem::path inside(const std::string& name) const {
    return root() / kVersionDirectory / name;
  }
  std::string environment() const { return environment_id_of(options().environment); }
  std::filesystem::path manifest_path(std::uint64_t n) const {
    return inside(manifest_file(environment(), key_of(n)));
  }
  std::filesystem::path object_path(std::uint64_t n) const {
    return inside(object_file(ObjectKind::kSharedObject, sha256(answer_object(n))));
  }

  StoreOptions options() const {
    StoreOptions result;
    result.root = root();
    result.environment = "torch: 2.11.0\ncompiler: fake 1\n";
    return result;
  }

  static std::unique_ptr<DiskStore> open(StoreOptions options) {
    auto store = DiskStore::open(std::move(options));
    EXPECT_TRUE(store) << store.status().to_string();
    return store ? std::move(store).value() : nullptr;
  }
  std::unique_ptr<DiskStore> open() const { return open(options()); }

  std::filesystem::path source_of(std::uint64_t n) const {
    std::filesystem::path path = directory_.path() / ("source" + std::to_string(n) + ".so");
    write_bytes(path, answer_object(n));
    return path;
  }

  Result<Manifest> publish_kernel(DiskStore& store, std::uint64_t n) const {
    return store.publish(entry_of(n, EntryKind::kKernel),
                         {{ObjectKind::kSharedObject, source_of(n)}});
  }

  // The whole first use: find, verify, load, run.
  static Result<std::uint64_t> use(DiskStore& store, std::uint64_t n) {
    Result<Manifest> manifest = store.find(key_of(n));
    if (!manifest) return manifest.status();
    Result<std::filesystem::path> path = store.verified_shared_object(manifest.value(), 0);
    if (!path) return path.status();
    Result<SharedLibrary> library = SharedLibrary::open(path.value());
    if (!library) return library.status();
    return ask(library.value());
  }

  // As use(), without loading: for thousands of objects.
  static Status check(DiskStore& store, std::uint64_t n) {
    Result<Manifest> manifest = store.find(key_of(n));
    if (!manifest) return manifest.status();
    return store.verified_shared_object(manifest.value(), 0).status();
  }

  static std::size_t count_files(const std::filesystem::path& folder) {
    if (!std::filesystem::exists(folder)) return 0;
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
      if (!entry.is_directory()) ++count;
    }
    return count;
  }

  TemporaryDirectory directory_;
};

}  // namespace eagercache
