// Opening and reading. The order of checks before anything is loaded: name, type, owner, mode,
// size, digest, then what the content says. A damaged thing is moved aside once, and is a miss from
// then on.
#include "kernel_cache/store/disk_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <span>
#include <utility>

#include "kernel_cache/base/cpu_features.h"
#include "kernel_cache/base/fork_guard.h"
#include "kernel_cache/base/guarded.h"
#include "kernel_cache/files/sealed_copy.h"
#include "kernel_cache/format/file_names.h"
#include "kernel_cache/loading/elf_check.h"
#include "kernel_cache/store/store_impl.h"
#include "kernel_cache/store/withdrawal.h"

namespace eagercache {
namespace {

constexpr std::int64_t kTouchSeconds = 3600;
constexpr std::int64_t kMaxRetryDelay = 24 * 3600;
constexpr int kOpenAttempts = 20;

std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span<const char>(text.data(), text.size()));
}

}  // namespace

bool failure_stands(const Manifest& manifest, std::int64_t now) noexcept {
  if (manifest.failure == FailureClass::kDeterministic) return true;
  return now < manifest.retry_after && manifest.retry_after <= now + kMaxRetryDelay;
}

DiskStore::Impl::Impl(StoreOptions store_options)
    : options(std::move(store_options)),
      files(options.files == nullptr ? FileLayer::posix() : *options.files),
      generation(fork_generation()),
      local(files, std::filesystem::absolute(options.root).lexically_normal(), options.environment,
            TrustPolicy{options.allow_untrusted}),
      writer(local, options.environment),
      attempts(local),
      read_only(options.read_only) {}

Status DiskStore::Impl::open() {
  if (Status status = check_process_privileges(); !status) return status;
  if (options.root.empty()) return {StatusCode::kInvalidArgument, "the store's root has no name"};
  if (Status status = local.open(); !status) return status;
  // Seen without a try, so that nothing is written below what is not ours to write.
  if (const auto tree = local.handle(); tree != nullptr) {
    const int error = files.may_write(tree->directory());
    if (error == -EACCES || error == -EROFS || error == -EPERM) read_only = true;
  }
  if (!read_only) {
    Status made = writer.ensure_layout(/*thorough=*/true);
    // Somebody deletes the store while we make it. He has an end; were he to go on for ever, every
    // publish would try again.
    for (int i = 0; i < kOpenAttempts && made.code() == StatusCode::kNotFound; ++i) {
      made = writer.ensure_layout(/*thorough=*/true);
    }
    if (made.code() == StatusCode::kRefused || made.code() == StatusCode::kIncompatible) {
      return made;
    }
    // Full, not ours to write, or out of order: what is there can still be read, when something is
    // there. Only permissions and read-only mounts stay as they are for a process's life.
    if (!made.is_ok() && local.handle() == nullptr) return made;
    read_only = made.code() == StatusCode::kDenied;
  }
  for (const std::filesystem::path& root : options.tiers) {
    auto tier =
        std::make_unique<StoreTree>(files, std::filesystem::absolute(root).lexically_normal(),
                                    options.environment, TrustPolicy{options.allow_untrusted});
    if (Status status = tier->open(); !status) {
      tier_problems.push_back(std::move(status));
    } else {
      tiers.push_back(std::move(tier));
    }
  }
  return Status::ok();
}

Status DiskStore::Impl::check_writable() const {
  if (generation != fork_generation()) {
    return {StatusCode::kRefused, "this store was opened before fork(); a child only reads it"};
  }
  if (read_only) return {StatusCode::kRefused, local.root().native() + " is opened read-only"};
  return Status::ok();
}

// One entry file's content, or the reason for a miss; damage goes to quarantine here.
Result<Manifest> DiskStore::Impl::accept(const Result<FoundEntry>& found, const std::string& name) {
  if (!found) {
    // Another format version's entry is intact, and not there for us.
    if (found.code() == StatusCode::kCorrupt) {
      put_aside_file(name);
    } else if (found.code() != StatusCode::kIncompatible) {
      return found.status();
    }
    return Status(StatusCode::kNotFound, found.status().message());
  }
  const std::int64_t now = files.now();
  const Manifest& manifest = found->manifest;
  if (manifest.kind == EntryKind::kFailed && !failure_stands(manifest, now)) {
    return Status(StatusCode::kNotFound, "the failure's time to retry has come");
  }
  if (std::string why = withdrawal(manifest, /*tells=*/true); !why.empty()) {
    return Status(StatusCode::kNotFound, std::move(why));
  }
  if (now - found->last_used > kTouchSeconds && check_writable()) {
    // The modification time is the time of last use; nothing depends on it but eviction's order.
    const auto tree = local.handle();
    if (tree != nullptr) files.set_time(tree->directory(), name.c_str(), now);
  }
  return manifest;
}

Result<Manifest> DiskStore::Impl::find_local(const Digest& key) {
  if (local.is_blocked(key)) return Status(StatusCode::kNotFound, key.hex() + " is blocked");
  Result<Manifest> hit =
      accept(local.find_kernel_or_decision(key), manifest_file(local.environment(), key));
  if (hit || hit.code() != StatusCode::kNotFound) return hit;
  hit = accept(local.find_failure(key), failure_file(local.environment(), key));
  if (!hit && hit.code() == StatusCode::kNotFound) local.look_again();
  return hit;
}

Result<Manifest> DiskStore::Impl::find_in_tiers(const Digest& key) {
  for (const auto& tier : tiers) {
    if (tier->is_blocked(key)) continue;
    Result<FoundEntry> found = tier->find_kernel_or_decision(key);
    if (found.code() == StatusCode::kNotFound) {
      found = tier->find_failure(key);
      if (found && !failure_stands(found->manifest, files.now())) continue;
    }
    if (!found) {
      tier->look_again();
      continue;
    }
    if (!withdrawal(found->manifest, /*tells=*/true).empty()) continue;
    if (!check_writable()) return std::move(found->manifest);
    Result<Manifest> copied = copy_in(*tier, found->manifest);
    // A full disk does not make the tier's entry worse: it is used in place. A damaged one is
    // passed over.
    if (copied) return copied;
    if (copied.code() != StatusCode::kCorrupt) return std::move(found->manifest);
    tier->block(key);
  }
  return Status(StatusCode::kNotFound, "no entry " + key.hex());
}

Result<Manifest> DiskStore::Impl::find(const Digest& key) {
  Result<Manifest> hit = find_local(key);
  if (hit || tiers.empty()) return hit;
  Result<Manifest> elsewhere = find_in_tiers(key);
  return elsewhere ? std::move(elsewhere) : std::move(hit);
}

Result<Manifest> DiskStore::Impl::find_untried(const Digest& key) {
  if (!local.is_blocked(key)) {
    const Result<FoundEntry> found = local.find_kernel_or_decision(key);
    if (found && is_untried(found->manifest) &&
        withdrawal(without_untried(found->manifest), /*tells=*/false).empty()) {
      return found->manifest;
    }
  }
  return Status(StatusCode::kNotFound, "no untried entry " + key.hex());
}

std::string DiskStore::Impl::withdrawal(const Manifest& manifest, bool tells) {
  std::string why = withdrawal_of(manifest, options.revoked, files.now());
  if (why.empty() || !tells || !options.on_withdrawn) return why;
  // Nobody has to do anything about what is untried.
  if (withdrawal_of(without_untried(manifest), options.revoked, files.now()).empty()) return why;
  const bool is_new = [&] {
    const std::lock_guard lock(told_mutex_);
    return told_.insert(why).second;
  }();
  if (is_new) options.on_withdrawn(why);
  return why;
}

void DiskStore::Impl::put_aside_file(const std::string& name) {
  ++quarantined;
  // In a read-only store the damaged file stays, and stays a miss.
  if (check_writable()) (void)writer.quarantine(name).is_ok();
}

// `manifest` is what the caller holds; the entry may have been replaced since it was read.
void DiskStore::Impl::put_aside_entry(StoreTree& tree, const Manifest& manifest,
                                      const ObjectRef& object, bool object_is_damaged) {
  ++quarantined;
  if (&tree != &local || !check_writable()) {
    tree.block(manifest.key);
    return;
  }
  // The object goes first: published again under the same name, it must find the name free.
  if (object_is_damaged) (void)writer.quarantine(object_file(object.kind, object.digest)).is_ok();
  const Result<FoundEntry> current = local.find_kernel_or_decision(manifest.key);
  if (current && current->manifest == manifest) {
    (void)writer.quarantine(manifest_file(local.environment(), manifest.key)).is_ok();
  }
}

Result<std::string> DiskStore::Impl::read_object(const Manifest& manifest, std::size_t index) {
  if (index >= manifest.objects.size()) {
    return Status(StatusCode::kInvalidArgument, "the entry has no object of that index");
  }
  const ObjectRef& object = manifest.objects[index];
  Result<std::string> bytes = local.read_object(object);
  if (bytes) return bytes;
  if (bytes.code() != StatusCode::kNotFound) {
    if (bytes.code() == StatusCode::kCorrupt) put_aside_entry(local, manifest, object, true);
    return bytes;
  }
  for (const auto& tier : tiers) {
    Result<std::string> there = tier->read_object(object);
    if (there) return there;
    if (there.code() == StatusCode::kCorrupt) put_aside_entry(*tier, manifest, object, true);
  }
  // Evicted since the manifest was read, or lost: either way the manifest leads nowhere.
  const Result<FoundEntry> current = local.find_kernel_or_decision(manifest.key);
  if (current) put_aside_entry(local, manifest, object, false);
  return bytes;
}

Result<std::filesystem::path> DiskStore::Impl::verified_shared_object(const Manifest& manifest,
                                                                      std::size_t index) {
  const std::string missing = missing_cpu_feature(manifest.cpu_features, host_cpu_features());
  if (!missing.empty()) {
    return Status(StatusCode::kIncompatible, "the kernel needs a CPU with " + missing);
  }
  const Result<std::string> bytes = read_object(manifest, index);
  if (!bytes) return bytes.status();
  const ObjectRef& object = manifest.objects[index];
  if (object.kind != ObjectKind::kSharedObject) {
    return Status(StatusCode::kInvalidArgument, "the object is no shared object");
  }
  if (Status status = check_elf(as_bytes(bytes.value())); !status) {
    // Intact but unfit, so it was published by something else than our publish(). Content that is
    // refused today is refused tomorrow.
    put_aside_entry(local, manifest, object, true);
    return status;
  }
  const std::string name = object_file(object.kind, object.digest);
  struct stat info {};
  const auto here = local.handle();
  if (here != nullptr && files.status(here->directory(), name.c_str(), &info) >= 0) {
    // Where others may write, what is loaded must be the very bytes that were hashed. A mount
    // without the right to run files does not concern memory.
    if (!here->loads_in_place()) return sealed_copy(object.digest, bytes.value());
    return std::filesystem::path(local.full_path(name));
  }
  for (const auto& tier : tiers) {
    const auto there = tier->handle();
    if (there == nullptr || files.status(there->directory(), name.c_str(), &info) < 0) continue;
    if (!there->loads_in_place()) return sealed_copy(object.digest, bytes.value());
    return std::filesystem::path(tier->full_path(name));
  }
  return Status(StatusCode::kNotFound, local.full_path(name) + " vanished");
}

DiskStore::DiskStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

DiskStore::~DiskStore() = default;

Result<std::unique_ptr<DiskStore>> DiskStore::open(StoreOptions options) {
  return guarded([&]() -> Result<std::unique_ptr<DiskStore>> {
    auto impl = std::make_unique<Impl>(std::move(options));
    if (Status status = impl->open(); !status) return status;
    return std::unique_ptr<DiskStore>(new DiskStore(std::move(impl)));
  });
}

Result<Manifest> DiskStore::find(const Digest& key) {
  return guarded([&] { return impl_->find(key); });
}

Result<Manifest> DiskStore::find_untried(const Digest& key) {
  return guarded([&] { return impl_->find_untried(key); });
}

Result<std::string> DiskStore::read_object(const Manifest& manifest, std::size_t index) {
  return guarded([&] { return impl_->read_object(manifest, index); });
}

Result<std::filesystem::path> DiskStore::verified_shared_object(const Manifest& manifest,
                                                                std::size_t index) {
  return guarded([&] { return impl_->verified_shared_object(manifest, index); });
}

Result<Manifest> DiskStore::publish(Manifest manifest, const std::vector<ObjectSource>& sources) {
  return guarded([&] { return impl_->publish(std::move(manifest), sources); });
}

Result<FileLock> DiskStore::try_lock(const Digest& key) {
  return guarded([&] { return impl_->try_lock(key); });
}

Result<std::filesystem::path> DiskStore::make_work_directory() {
  return guarded([&] { return impl_->make_work_directory(); });
}

Status DiskStore::quarantine(const Digest& key, std::string_view reason) {
  return guarded([&] { return impl_->quarantine(key, reason); });
}

Status DiskStore::check_attempts(const Digest& key) {
  return guarded([&] { return impl_->check_attempts(key); });
}

void DiskStore::note_attempt(const Digest& key, bool begins) noexcept {
  impl_->attempts.note(key, begins);
}

Status DiskStore::remove(const Digest& key) {
  return guarded([&] { return impl_->remove(key); });
}

Result<EvictionResult> DiskStore::evict(bool force) {
  return guarded([&] { return impl_->evict(force); });
}

Result<EvictionResult> DiskStore::evict_when_due() {
  return guarded([&] { return impl_->evict_when_due(); });
}

Status DiskStore::for_each(bool all, const std::function<void(const EntryInfo&)>& visit) {
  const auto entries = guarded([&] { return impl_->entries(all); });
  if (!entries) return entries.status();
  for (const EntryInfo& entry : entries.value()) visit(entry);
  return Status::ok();
}

std::string DiskStore::withdrawal(const Manifest& manifest) const {
  return impl_->withdrawal(manifest, /*tells=*/false);
}

const std::filesystem::path& DiskStore::root() const { return impl_->local.root(); }

const std::string& DiskStore::environment_id() const { return impl_->local.environment(); }

bool DiskStore::read_only() const { return impl_->read_only; }

std::uint64_t DiskStore::quarantined() const { return impl_->quarantined; }

const std::vector<Status>& DiskStore::tier_problems() const { return impl_->tier_problems; }

std::vector<std::filesystem::path> DiskStore::untrusted_roots() const {
  std::vector<std::filesystem::path> roots;
  const auto add = [&roots](const StoreTree& tree) {
    const auto handle = tree.handle();
    if (handle != nullptr && !handle->trusted()) roots.push_back(tree.root());
  };
  add(impl_->local);
  for (const auto& tier : impl_->tiers) add(*tier);
  return roots;
}

}  // namespace eagercache
