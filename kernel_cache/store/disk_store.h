#pragma once

// The store as the layers above see it, with what they may choose of it and what it counts. How its
// inside is divided is in store_impl.h.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernel_cache/base/digest.h"
#include "kernel_cache/base/status.h"
#include "kernel_cache/files/file_layer.h"
#include "kernel_cache/files/file_lock.h"
#include "kernel_cache/format/manifest.h"
#include "kernel_cache/format/revocations.h"

namespace eagercache {

struct StoreOptions {
  std::filesystem::path root;
  // The environment key's full text (one "field: value" line per input of code generation). Entries
  // of different texts never meet; the text is stored beside them for `doctor`.
  std::string environment;
  // Never writes, locks or creates anything below `root`; a missing root is an empty store.
  bool read_only = false;
  // Read-only stores of the same layout, asked in order after the local one. A hit there is copied
  // in (verified first), or, when this store is read-only, used in place under the same trust
  // rules.
  std::vector<std::filesystem::path> tiers;
  // Accept tiers and roots that other users may write. Off by default; logged by the caller.
  bool allow_untrusted = false;
  std::uint64_t max_bytes = std::uint64_t{10} << 30;
  std::uint64_t max_entries = 1'000'000;
  // Entries unused for longer go at the next eviction.
  std::int64_t max_age_seconds = std::int64_t{180} * 24 * 3600;
  // Entries that a bundle brought are misses where it, or the key that signed it, is revoked.
  Revocations revoked;
  // Learns why such an entry, or one that has expired, is not used: once for each reason, on the
  // thread that looked for it. Must not throw or call the store.
  std::function<void(const std::string&)> on_withdrawn;
  // The file system; nullptr means the real one. Must outlive the store. For fault injection.
  FileLayer* files = nullptr;
};

// One file to publish with an entry, already complete on disk (in the store's own work directory or
// elsewhere). It is copied, hashed and made immutable; the source is left as it was.
struct ObjectSource {
  ObjectKind kind = ObjectKind::kSharedObject;
  std::filesystem::path path;
};

// An entry as listings show it.
struct EntryInfo {
  Manifest manifest;
  std::string environment;  // the env16 directory name
  std::uint64_t bytes = 0;  // manifest and objects
  std::int64_t last_used = 0;
};

struct EvictionResult {
  std::uint64_t entries_removed = 0;
  std::uint64_t objects_removed = 0;
  std::uint64_t temporaries_removed = 0;
  std::uint64_t bytes_removed = 0;
};

// The persistent store of kernels and decisions for one environment: content-addressed immutable
// objects, and manifests published last by one link(2). FORMAT.md describes the files;
// README.md what is checked and how processes agree.
//
// Thread-safe and safe between processes: no method waits for a lock. Every method may be called
// at any time, also after the directory was deleted. After fork() the child's calls that would
// write return kRefused.
class DiskStore {
 public:
  // Checks trust (owner, mode, type of every path component, below `root` too), creates what is
  // missing unless read-only, and writes ENV. kRefused names the component and the remedy. A root
  // that may not be written becomes a read-only store. Reads no entry.
  static Result<std::unique_ptr<DiskStore>> open(StoreOptions options);
  ~DiskStore();

  // The entry for `key`: kernel, decision or unexpired failure. kNotFound is a miss. A damaged
  // manifest is quarantined and reported as kNotFound after being counted. A retry time more than a
  // day ahead counts as expired: some clock was wrong. Neither is an entry found whose bundle has
  // expired or is revoked, nor one that is untried; the next one that is published for its key
  // takes its place.
  Result<Manifest> find(const Digest& key);

  // The store's own entry that another kind of machine made and that was not tried here, for which
  // find() is a miss (withdrawal.h). kNotFound for any other, and once it is withdrawn.
  Result<Manifest> find_untried(const Digest& key);

  // Reads and verifies one object: owner, mode, type, size, SHA-256 of the whole file. On damage
  // the entry is quarantined and kCorrupt is returned.
  Result<std::string> read_object(const Manifest& manifest, std::size_t index);

  // Path of a verified shared object that may be given to dlopen now, in this process: CPU
  // features, read_object's checks, then ELF sanity (elf_check.h). The path's content can never
  // change: its name is its hash, or, where another user may write the store or its file system is
  // mounted noexec, it is a sealed copy in memory that is kept for the process's life (kFull when
  // these take too many descriptors).
  Result<std::filesystem::path> verified_shared_object(const Manifest& manifest, std::size_t index);

  // Copies `sources` in, fills manifest.objects from them, and commits the manifest. When an entry
  // for the key is there already, that one stays and its manifest is returned.
  // A kFailed entry is replaced by a later kernel or decision.
  Result<Manifest> publish(Manifest manifest, const std::vector<ObjectSource>& sources);

  // Takes the key's cross-process compile lock, or kBusy. Released by the handle's destructor or by
  // the kernel when the process dies; never inherited by children. 256 locks are shared by all
  // keys, so two keys of one process may exclude each other. Whoever got it calls find() again
  // before it compiles: the last holder may have published meanwhile.
  Result<FileLock> try_lock(const Digest& key);

  // A fresh private directory below the store's temporary folder, for a compile.
  Result<std::filesystem::path> make_work_directory();

  // Moves the entry's manifest to quarantine, so that the next miss recreates it, and writes
  // `reason` beside it. In a read-only store, and in a tier, this process forgets the entry
  // instead.
  Status quarantine(const Digest& key, std::string_view reason);
  // Whether the key's kernel may be loaded. kIncompatible when two processes died while they loaded
  // it or ran it for the first time: its entry is put aside, and a failure stands for the key until
  // somebody removes it. Where the store cannot be written, nothing is known.
  Status check_attempts(const Digest& key);
  // Brackets what may kill the process: loading a kernel, and its first run. Costs one write(2) to
  // an open file, after check_attempts was called once. Pairs may nest and overlap.
  void note_attempt(const Digest& key, bool begins) noexcept;
  // Removes one entry's manifest. kNotFound when there is none.
  Status remove(const Digest& key);

  // Mark-and-sweep down to 80 % of the caps when they are passed (always when `force`), stale
  // temporary files and objects without manifest older than an hour included. One evictor at a
  // time: kBusy.
  Result<EvictionResult> evict(bool force);

  // evict(false), unless any process has evicted within the last ten minutes: kBusy. For whoever
  // publishes.
  Result<EvictionResult> evict_when_due();

  // Every intact entry of this environment (of all environments when `all`), order unspecified.
  // Changes nothing. Exceptions of `visit` pass through.
  Status for_each(bool all, const std::function<void(const EntryInfo&)>& visit);

  // Why an entry of a bundle is not used any more, or not yet (withdrawal.h); empty while it is.
  std::string withdrawal(const Manifest& manifest) const;

  const std::filesystem::path& root() const;
  // Sixteen hex digits naming this environment's folder.
  const std::string& environment_id() const;
  bool read_only() const;
  // Number of entries found damaged and quarantined by this object.
  std::uint64_t quarantined() const;
  // Why tiers of the options are not used (refused or unreadable), one per such tier.
  const std::vector<Status>& tier_problems() const;
  // Roots of the local store and of tiers that another user may write, which `allow_untrusted` let
  // pass. The caller logs them.
  std::vector<std::filesystem::path> untrusted_roots() const;

 private:
  class Impl;
  explicit DiskStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace eagercache
