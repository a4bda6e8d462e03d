#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_cache/store/attempt_log.h"
#include "kernel_cache/store/disk_store.h"
#include "kernel_cache/store/store_tree.h"
#include "kernel_cache/store/store_writer.h"

namespace eagercache {

// An object that is in the store's temporary folder, complete.
struct PendingObject {
  ObjectRef reference;
  TemporaryFile temporary;
};

// DiskStore's inside. disk_store.cc reads, store_publish.cc writes, store_eviction.cc removes.
class DiskStore::Impl {
 public:
  explicit Impl(StoreOptions store_options);

  Status open();
  // kRefused in a read-only store and in a forked child.
  Status check_writable() const;

  // Reading (disk_store.cc).
  Result<Manifest> find(const Digest& key);
  Result<Manifest> find_untried(const Digest& key);
  Result<std::string> read_object(const Manifest& manifest, std::size_t index);
  Result<std::filesystem::path> verified_shared_object(const Manifest& manifest, std::size_t index);

  // Writing (store_publish.cc).
  Result<Manifest> publish(Manifest manifest, const std::vector<ObjectSource>& sources);
  Result<Manifest> copy_in(StoreTree& tier, const Manifest& manifest);
  Result<FileLock> try_lock(const Digest& key);
  Result<std::filesystem::path> make_work_directory();
  Status quarantine(const Digest& key, std::string_view reason);
  Status remove(const Digest& key);
  Status check_attempts(const Digest& key);

  // Removing (store_eviction.cc).
  Result<EvictionResult> evict(bool force);
  Result<EvictionResult> evict_when_due();
  enum class EvictionNeed { kWhenPassed, kForced, kDeviceFull };
  Result<EvictionResult> evict_with(EvictionNeed need);
  Result<std::vector<EntryInfo>> entries(bool all) const;

  // As DiskStore's; `tells` says it to the options' on_withdrawn.
  std::string withdrawal(const Manifest& manifest, bool tells);

  const StoreOptions options;
  FileLayer& files;
  const std::uint64_t generation;
  StoreTree local;
  StoreWriter writer;
  AttemptLog attempts;
  std::vector<std::unique_ptr<StoreTree>> tiers;
  std::vector<Status> tier_problems;
  std::atomic<bool> read_only;
  std::atomic<std::uint64_t> quarantined{0};
  std::atomic<std::int64_t> next_emergency{0};  // seconds since the epoch

 private:
  Result<Manifest> find_local(const Digest& key);
  Result<Manifest> find_in_tiers(const Digest& key);
  Result<Manifest> accept(const Result<FoundEntry>& found, const std::string& name);
  void put_aside_file(const std::string& name);
  void put_aside_entry(StoreTree& tree, const Manifest& manifest, const ObjectRef& object,
                       bool object_is_damaged);

  Result<Manifest> publish_once(const Manifest& manifest, const std::vector<ObjectSource>& sources);
  Result<PendingObject> stage(ObjectKind kind, const std::string& bytes);
  Result<std::string> read_source(const std::filesystem::path& path);
  bool claim(const std::string& name);
  Status commit_object(const PendingObject& object);
  Result<Manifest> existing_entry(const Digest& key, EntryKind wanted);
  Result<Manifest> commit_entry(const Manifest& manifest,
                                const std::vector<PendingObject>& objects);
  Status commit_failure(const Manifest& manifest, const TemporaryFile& temporary);

  std::mutex told_mutex_;
  std::set<std::string> told_;  // guarded by told_mutex_
};

// Whether a failure still stands at `now`.
bool failure_stands(const Manifest& manifest, std::int64_t now) noexcept;

}  // namespace eagercache
