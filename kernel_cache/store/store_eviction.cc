// Listing and eviction. Mark: read every manifest. Sweep: the longest unused entries first,
// manifests before objects, so that a reader meets either a whole entry or a miss. Code that runs
// from an unlinked file goes on running.
#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <utility>

#include "kernel_cache/format/file_names.h"
#include "kernel_cache/store/store_impl.h"

namespace eagercache {
namespace {

constexpr std::int64_t kGraceSeconds = 3600;
constexpr std::int64_t kEvictionSeconds = 600;

// An entry that was found, with what decides when it has to go.
struct ScannedEntry {
  Manifest manifest;
  std::string name;
  std::string environment;
  std::uint64_t bytes = 0;
  std::int64_t last_used = 0;
};

// An object that was found, and how many entries name it.
struct ScannedObject {
  std::uint64_t bytes = 0;
  timespec modified{};
  std::uint64_t references = 0;
};

// What lies in a store, as far as it could be read. Other processes may have changed it since.
struct Scan {
  std::vector<ScannedEntry> entries;
  std::vector<std::string> damaged;              // names of manifests that nobody can read
  std::map<std::string, ScannedObject> objects;  // by name
  std::uint64_t bytes = 0;
};

// Looks through a store without a lock.
class Scanner {
 public:
  explicit Scanner(const StoreTree& tree) : tree_(tree) {}

  // Entries of one environment, or of all when `environment` is empty.
  Result<Scan> run(const std::string& environment, bool with_objects) {
    const auto top = tree_.list(".");
    if (!top) return top.status();
    // Before the manifests: a publisher claims an object, links its manifest and claims again, so
    // either we see that manifest or the last claim comes after our look at the object.
    if (with_objects) scan_fan_out(kObjectsDirectory);
    for (const std::string& name : top.value()) {
      if (!is_environment_id(name) || (!environment.empty() && name != environment)) continue;
      scan_fan_out(environment_folder(name, kManifestsDirectory));
      scan_folder(environment_folder(name, kFailuresDirectory));
    }
    return std::move(scan_);
  }

 private:
  void scan_fan_out(const std::string& folder) {
    const auto names = tree_.list(folder);
    if (!names) return;
    for (const std::string& name : names.value()) {
      if (is_fan_out(name)) scan_folder(folder + "/" + name);
    }
  }

  void scan_folder(const std::string& folder) {
    const auto names = tree_.list(folder);
    if (!names) return;
    for (const std::string& leaf : names.value()) {
      const std::string name = folder + "/" + leaf;
      const auto parsed = parse_name(name);
      if (!parsed) continue;
      if (parsed->kind == NameKind::kObject) {
        add_object(name);
      } else {
        add_entry(name, *parsed);
      }
    }
  }

  void add_object(const std::string& name) {
    const auto tree = tree_.handle();
    struct stat info {};
    if (tree == nullptr || tree_.files().status(tree->directory(), name.c_str(), &info) < 0) return;
    const auto bytes = static_cast<std::uint64_t>(info.st_size);
    scan_.objects[name] = {bytes, info.st_mtim, 0};
    scan_.bytes += bytes;
  }

  void add_entry(const std::string& name, const ParsedName& parsed) {
    const Result<CheckedFile> file = tree_.read_file(name, kMaxManifestBytes);
    // Gone since the listing, or a passing error: not ours to judge now.
    if (!file && file.code() != StatusCode::kCorrupt) return;
    Result<Manifest> manifest =
        file ? decode_manifest(file->bytes) : Result<Manifest>(file.status());
    if (manifest.code() == StatusCode::kIncompatible) return;
    if (!manifest || manifest->key != parsed.digest ||
        !manifest->environment.hex().starts_with(parsed.environment)) {
      scan_.damaged.push_back(name);
      return;
    }
    scan_.bytes += file->bytes.size();
    scan_.entries.push_back({std::move(manifest).value(), name, parsed.environment,
                             file->bytes.size(),
                             static_cast<std::int64_t>(file->info.st_mtim.tv_sec)});
  }

  const StoreTree& tree_;
  Scan scan_;
};

// What a store may hold after it was swept.
struct Limits {
  std::uint64_t bytes = 0;
  std::uint64_t entries = 0;
  std::int64_t max_age = 0;
};

// Removes what is too old or too much, the entries first: an object goes when nothing names it.
class Sweeper {
 public:
  Sweeper(StoreTree& tree, StoreWriter& writer, Scan scan)
      : tree_(tree), writer_(writer), scan_(std::move(scan)), now_(tree.files().now()) {}

  EvictionResult run(const Limits& limits) {
    for (const std::string& name : scan_.damaged) (void)writer_.quarantine(name).is_ok();
    count_references();
    remove_entries(limits);
    remove_objects();
    remove_temporaries();
    result_.temporaries_removed += writer_.trim_quarantine();
    return result_;
  }

 private:
  static std::string name_of(const ObjectRef& object) {
    return object_file(object.kind, object.digest);
  }

  void count_references() {
    for (const ScannedEntry& entry : scan_.entries) {
      for (const ObjectRef& object : entry.manifest.objects) {
        const auto place = scan_.objects.find(name_of(object));
        if (place != scan_.objects.end()) ++place->second.references;
      }
    }
  }

  bool unlink(const std::string& name) {
    const auto tree = tree_.handle();
    return tree != nullptr && tree_.files().unlink(tree->directory(), name.c_str(), false) >= 0;
  }

  void remove_entries(const Limits& limits) {
    // A time in the future is a wrong clock's; such an entry counts as used now.
    for (ScannedEntry& entry : scan_.entries) entry.last_used = std::min(entry.last_used, now_);
    std::sort(scan_.entries.begin(), scan_.entries.end(),
              [](const ScannedEntry& left, const ScannedEntry& right) {
                return std::pair(left.last_used, left.name) <
                       std::pair(right.last_used, right.name);
              });
    std::uint64_t bytes = scan_.bytes;
    std::uint64_t count = scan_.entries.size();
    for (const ScannedEntry& entry : scan_.entries) {
      const bool too_old = now_ - entry.last_used > limits.max_age;
      if (bytes <= limits.bytes && count <= limits.entries && !too_old) break;
      if (!unlink(entry.name)) continue;
      ++result_.entries_removed;
      result_.bytes_removed += entry.bytes;
      --count;
      bytes -= entry.bytes;
      bytes -= release_objects(entry.manifest);
    }
  }

  // Bytes of the objects that no entry needs any more.
  std::uint64_t release_objects(const Manifest& manifest) {
    std::uint64_t bytes = 0;
    for (const ObjectRef& object : manifest.objects) {
      const auto place = scan_.objects.find(name_of(object));
      if (place == scan_.objects.end() || --place->second.references > 0) continue;
      bytes += place->second.bytes;
      released_.insert(place->first);
    }
    return bytes;
  }

  void remove_objects() {
    for (const auto& [name, object] : scan_.objects) {
      if (object.references > 0 || !remove_object(name, object)) continue;
      ++result_.objects_removed;
      result_.bytes_removed += object.bytes;
    }
  }

  bool remove_object(const std::string& name, const ScannedObject& object) {
    const auto tree = tree_.handle();
    if (tree == nullptr) return false;
    FileLayer& files = tree_.files();
    struct stat info {};
    if (files.status(tree->directory(), name.c_str(), &info) < 0) return false;
    if (!goes(name, object, info)) return false;
    // A publisher may claim it between that look and its removal. So it loses its name first: from
    // then on a publisher sees that it is missing and makes it anew, and what was claimed until
    // then gets its name back.
    std::string aside = temporary_file(new_temporary_name(false));
    const int renamed = files.rename(tree->directory(), name.c_str(), tree->directory(),
                                     aside.c_str(), /*replace=*/true);
    if (renamed < 0) return false;
    const TemporaryFile taken(tree, files, std::move(aside));
    const int error = files.status(tree->directory(), taken.name(), &info);
    if (error >= 0 && goes(name, object, info)) return true;
    (void)writer_.commit(taken, name).is_ok();
    return false;
  }

  // An object that lost its entry just now goes with it, unless a publisher has claimed it since
  // the scan. One that never had an entry may be about to get it.
  bool goes(const std::string& name, const ScannedObject& object, const struct stat& info) const {
    if (released_.contains(name)) {
      return info.st_mtim.tv_sec == object.modified.tv_sec &&
             info.st_mtim.tv_nsec == object.modified.tv_nsec;
    }
    return now_ - static_cast<std::int64_t>(info.st_mtim.tv_sec) > kGraceSeconds;
  }

  void remove_temporaries() {
    const auto tree = tree_.handle();
    const auto names = tree_.list(kTemporaryDirectory);
    if (tree == nullptr || !names) return;
    for (const std::string& leaf : names.value()) {
      const std::string name = std::string(kTemporaryDirectory) + "/" + leaf;
      struct stat info {};
      if (tree_.files().status(tree->directory(), name.c_str(), &info) < 0) continue;
      const auto parsed = parse_name(name);
      const bool abandoned = parsed && owner_is_dead(parsed->temporary);
      const bool old = now_ - static_cast<std::int64_t>(info.st_mtim.tv_sec) > kGraceSeconds;
      if ((abandoned || old) && writer_.remove_tree(name)) ++result_.temporaries_removed;
    }
  }

  StoreTree& tree_;
  StoreWriter& writer_;
  Scan scan_;
  const std::int64_t now_;
  std::set<std::string> released_;
  EvictionResult result_;
};

// 80 %: the low-water mark, so that the next publish does not evict again.
std::uint64_t low_water(std::uint64_t cap) noexcept { return cap - cap / 5; }

}  // namespace

Result<EvictionResult> DiskStore::Impl::evict(bool force) {
  return evict_with(force ? EvictionNeed::kForced : EvictionNeed::kWhenPassed);
}

// The lock file's time says when the last eviction ended. One in the future is a wrong clock's.
Result<EvictionResult> DiskStore::Impl::evict_when_due() {
  const auto tree = local.handle();
  struct stat info {};
  if (tree != nullptr && files.status(tree->directory(), kEvictionLock, &info) >= 0) {
    const std::int64_t since = files.now() - static_cast<std::int64_t>(info.st_mtim.tv_sec);
    if (since >= 0 && since < kEvictionSeconds) {
      return Status(StatusCode::kBusy, "the last eviction is less than ten minutes old");
    }
  }
  return evict(false);
}

Result<EvictionResult> DiskStore::Impl::evict_with(EvictionNeed need) {
  if (Status status = check_writable(); !status) return status;
  if (Status status = writer.ensure_layout(/*thorough=*/false); !status) return status;
  const auto tree = local.handle();
  if (tree == nullptr) return Status(StatusCode::kNotFound, "the store is gone");
  const Result<FileLock> lock = FileLock::try_acquire(files, tree->directory(), kEvictionLock);
  if (!lock) return lock.status();
  Result<Scan> scan = Scanner(local).run("", /*with_objects=*/true);
  if (!scan) return scan.status();
  Limits limits{options.max_bytes, options.max_entries, options.max_age_seconds};
  const bool passed = scan->bytes > limits.bytes || scan->entries.size() > limits.entries;
  // A full device asks for room whatever the cap: a fifth of what there is.
  if (need == EvictionNeed::kDeviceFull) limits.bytes = std::min(limits.bytes, scan->bytes);
  if (need != EvictionNeed::kWhenPassed || passed) {
    limits.bytes = low_water(limits.bytes);
    limits.entries = low_water(limits.entries);
  }
  EvictionResult result = Sweeper(local, writer, std::move(scan).value()).run(limits);
  result.temporaries_removed += attempts.sweep();
  files.set_time(tree->directory(), kEvictionLock, files.now());
  return result;
}

Result<std::vector<EntryInfo>> DiskStore::Impl::entries(bool all) const {
  Result<Scan> scan = Scanner(local).run(all ? "" : local.environment(), /*with_objects=*/false);
  if (!scan) return scan.status();
  std::vector<EntryInfo> entries;
  for (ScannedEntry& entry : scan->entries) {
    std::uint64_t bytes = entry.bytes;
    for (const ObjectRef& object : entry.manifest.objects) bytes += object.size;
    entries.push_back(
        {std::move(entry.manifest), std::move(entry.environment), bytes, entry.last_used});
  }
  return entries;
}

}  // namespace eagercache
