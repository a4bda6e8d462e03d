// Publishing. Objects first, each under the hash of its content, then the manifest by one link: the
// commit point. Before it there is no entry; after it the entry is complete. What a dying process
// leaves behind are files in the temporary folder and objects that no manifest names.
#include <fcntl.h>

#include <cerrno>
#include <span>
#include <utility>

#include "kernel_cache/format/file_names.h"
#include "kernel_cache/loading/elf_check.h"
#include "kernel_cache/store/store_impl.h"

namespace eagercache {
namespace {

constexpr std::int64_t kEmergencySeconds = 600;
constexpr std::size_t kDeathsAllowed = 1;

}  // namespace

Result<Manifest> DiskStore::Impl::publish(Manifest manifest,
                                          const std::vector<ObjectSource>& sources) {
  if (Status status = check_writable(); !status) return status;
  if ((manifest.kind == EntryKind::kKernel) == sources.empty()) {
    return Status(StatusCode::kInvalidArgument, "kernels have objects, other entries have none");
  }
  if (manifest.created == 0) manifest.created = files.now();
  manifest.environment = local.environment_digest();
  if (Status status = writer.ensure_layout(/*thorough=*/false); !status) return status;
  Result<Manifest> published = publish_once(manifest, sources);
  if (published.code() == StatusCode::kNotFound) {
    // Parts of the store were deleted under us.
    if (Status status = writer.ensure_layout(/*thorough=*/true); !status) return status;
    published = publish_once(manifest, sources);
  }
  if (published.code() != StatusCode::kFull) return published;
  const std::int64_t now = files.now();
  if (now < next_emergency.exchange(now + kEmergencySeconds)) return published;
  // The device is full although the store may be far below its cap: make room, once.
  const Result<EvictionResult> evicted = evict_with(EvictionNeed::kDeviceFull);
  if (!evicted || evicted->bytes_removed == 0) return published;
  return publish_once(manifest, sources);
}

Result<Manifest> DiskStore::Impl::publish_once(const Manifest& manifest,
                                               const std::vector<ObjectSource>& sources) {
  Result<Manifest> existing = existing_entry(manifest.key, manifest.kind);
  if (existing || existing.code() != StatusCode::kNotFound) return existing;
  Manifest complete = manifest;
  complete.objects.clear();
  std::vector<PendingObject> objects;
  for (const ObjectSource& source : sources) {
    const Result<std::string> bytes = read_source(source.path);
    if (!bytes) return bytes.status();
    Result<PendingObject> object = stage(source.kind, bytes.value());
    if (!object) return object.status();
    complete.objects.push_back(object->reference);
    objects.push_back(std::move(object).value());
  }
  return commit_entry(complete, objects);
}

Result<Manifest> DiskStore::Impl::copy_in(StoreTree& tier, const Manifest& manifest) {
  if (Status status = writer.ensure_layout(/*thorough=*/false); !status) return status;
  std::vector<PendingObject> objects;
  for (const ObjectRef& reference : manifest.objects) {
    const Result<std::string> bytes = tier.read_object(reference);
    if (!bytes) return bytes.status();
    Result<PendingObject> object = stage(reference.kind, bytes.value());
    if (!object) return object.status();
    objects.push_back(std::move(object).value());
  }
  return commit_entry(manifest, objects);
}

// Sources lie outside the store's rules: anywhere, written by the caller's own compiler.
Result<std::string> DiskStore::Impl::read_source(const std::filesystem::path& path) {
  const ScopedFd fd(files, files.open(AT_FDCWD, path.c_str(), O_RDONLY, 0));
  const auto failed = [&](const char* action, int error) {
    // kNotFound would mean that a part of the store is missing.
    if (error == -ENOENT) {
      return Status(StatusCode::kInvalidArgument, path.native() + ": there is no such file");
    }
    return Status::from_errno(-error, action, path.native());
  };
  if (!fd.valid()) return failed("open", fd.get());
  struct stat info {};
  if (const int error = files.status(fd.get(), "", &info); error < 0) return failed("stat", error);
  if (!S_ISREG(info.st_mode)) {
    return Status(StatusCode::kInvalidArgument, path.native() + " is not a regular file");
  }
  if (static_cast<std::uint64_t>(info.st_size) > kMaxObjectBytes) {
    return Status(StatusCode::kInvalidArgument, path.native() + " is too large for the store");
  }
  std::string bytes(static_cast<std::size_t>(info.st_size), '\0');
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t moved = files.read(fd.get(), bytes.data() + done, bytes.size() - done);
    if (moved <= 0) return failed("read", moved == 0 ? -EIO : static_cast<int>(moved));
    done += static_cast<std::size_t>(moved);
  }
  return bytes;
}

Result<PendingObject> DiskStore::Impl::stage(ObjectKind kind, const std::string& bytes) {
  if (kind == ObjectKind::kSharedObject) {
    // An object that every reader would refuse must not become an entry.
    const auto image = std::as_bytes(std::span<const char>(bytes.data(), bytes.size()));
    if (Status status = check_elf(image); !status) return status;
  }
  Result<TemporaryFile> temporary = writer.write_temporary(bytes);
  if (!temporary) return temporary.status();
  return PendingObject{ObjectRef{kind, sha256(bytes), bytes.size()}, std::move(temporary).value()};
}

// Makes an object young, so that an eviction that runs now leaves it to the manifest that is coming
// or has come. False when it is gone.
bool DiskStore::Impl::claim(const std::string& name) {
  const auto tree = local.handle();
  return tree != nullptr && files.set_time(tree->directory(), name.c_str(), files.now()) != -ENOENT;
}

Status DiskStore::Impl::commit_object(const PendingObject& object) {
  const std::string name = object_file(object.reference.kind, object.reference.digest);
  Result<Committed> committed = writer.commit(object.temporary, name);
  if (committed && committed.value() == Committed::kAlreadyThere) {
    if (local.read_object(object.reference)) {
      claim(name);
      return Status::ok();
    }
    // The name is right and the content is not: damage that nobody has read since.
    ++quarantined;
    if (Status status = writer.quarantine(name);
        !status && status.code() != StatusCode::kNotFound) {
      return status;
    }
    committed = writer.commit(object.temporary, name);
  }
  if (!committed) return committed.status();
  writer.sync_parent(name);
  return Status::ok();
}

// An entry that forbids publishing another one of kind `wanted`, kNotFound when there is none, or
// why that cannot be known. Damaged entries and
// withdrawn ones are moved aside.
Result<Manifest> DiskStore::Impl::existing_entry(const Digest& key, EntryKind wanted) {
  Result<FoundEntry> found = local.find_kernel_or_decision(key);
  const bool withdrawn = found && !withdrawal(found->manifest, /*tells=*/false).empty();
  if (found && !withdrawn && local.has_objects(found->manifest) && !local.is_blocked(key)) {
    return std::move(found->manifest);
  }
  if (found || found.code() == StatusCode::kCorrupt) {
    quarantined += withdrawn ? 0 : 1;
    (void)writer.quarantine(manifest_file(local.environment(), key)).is_ok();
  } else if (found.code() != StatusCode::kNotFound && found.code() != StatusCode::kIncompatible) {
    return found.status();
  }
  if (wanted == EntryKind::kFailed) {
    found = local.find_failure(key);
    if (found && failure_stands(found->manifest, files.now())) return std::move(found->manifest);
  }
  return Status(StatusCode::kNotFound, "no entry " + key.hex());
}

Status DiskStore::Impl::commit_failure(const Manifest& manifest, const TemporaryFile& temporary) {
  const std::string name = failure_file(local.environment(), manifest.key);
  Status replaced = writer.replace(temporary, name);
  if (!replaced.is_ok() && replaced.code() != StatusCode::kNotFound) {
    // Something that a file cannot replace, such as a directory.
    if (Status status = writer.quarantine(name); !status) return replaced;
    replaced = writer.replace(temporary, name);
  }
  if (replaced) writer.sync_parent(name);
  return replaced;
}

Result<Manifest> DiskStore::Impl::commit_entry(const Manifest& manifest,
                                               const std::vector<PendingObject>& objects) {
  const Result<std::string> text = encode_manifest(manifest);
  if (!text) return text.status();
  for (const PendingObject& object : objects) {
    if (Status status = commit_object(object); !status) return status;
  }
  const Result<TemporaryFile> temporary = writer.write_temporary(text.value());
  if (!temporary) return temporary.status();
  if (manifest.kind == EntryKind::kFailed) {
    if (Status status = commit_failure(manifest, temporary.value()); !status) return status;
    return manifest;
  }
  const std::string name = manifest_file(local.environment(), manifest.key);
  const Result<Committed> committed = writer.commit(temporary.value(), name);
  if (!committed) return committed.status();
  if (committed.value() == Committed::kAlreadyThere) {
    Result<Manifest> winner = existing_entry(manifest.key, manifest.kind);
    if (winner) return winner;
    // Nothing usable had the name: damage, now moved aside, or another format version's.
    if (Status status = writer.replace(temporary.value(), name); !status) return status;
  }
  // Claimed again now that a manifest names them: an eviction that looked for manifests before
  // leaves them from here on, and what it has taken away already comes back.
  for (const PendingObject& object : objects) {
    const std::string place = object_file(object.reference.kind, object.reference.digest);
    if (!claim(place) || !local.has_objects(manifest)) (void)commit_object(object).is_ok();
  }
  writer.sync_parent(name);
  const auto tree = local.handle();
  if (tree != nullptr) {
    files.unlink(tree->directory(), failure_file(local.environment(), manifest.key).c_str(), false);
  }
  return manifest;
}

Result<FileLock> DiskStore::Impl::try_lock(const Digest& key) {
  if (Status status = check_writable(); !status) return status;
  if (Status status = writer.ensure_layout(/*thorough=*/false); !status) return status;
  const auto tree = local.handle();
  if (tree == nullptr) return Status(StatusCode::kNotFound, "the store is gone");
  return FileLock::try_acquire(files, tree->directory(), lock_file(key).c_str());
}

Result<std::filesystem::path> DiskStore::Impl::make_work_directory() {
  if (Status status = check_writable(); !status) return status;
  if (Status status = writer.ensure_layout(/*thorough=*/false); !status) return status;
  const auto tree = local.handle();
  if (tree == nullptr) return Status(StatusCode::kNotFound, "the store is gone");
  const std::string name = temporary_file(new_temporary_name(true));
  const std::string path = local.full_path(name);
  if (const int error = files.make_directory(tree->directory(), name.c_str(), 0700); error < 0) {
    return Status::from_errno(-error, "make directory", path);
  }
  if (const int error = files.set_mode(tree->directory(), name.c_str(), 0700); error < 0) {
    return Status::from_errno(-error, "set mode of", path);
  }
  return std::filesystem::path(path);
}

Status DiskStore::Impl::quarantine(const Digest& key, std::string_view reason) {
  ++quarantined;
  if (!check_writable()) {
    local.block(key);
    for (const auto& tier : tiers) tier->block(key);
    return Status::ok();
  }
  for (const auto& tier : tiers) tier->block(key);
  Status moved = writer.quarantine(manifest_file(local.environment(), key));
  if (!moved) return moved;
  // For people; the entry is out of the way whether or not this succeeds.
  const Result<TemporaryFile> note = writer.write_temporary(reason);
  if (note) {
    const std::uint64_t random = new_temporary_name(false).random;
    (void)writer.replace(note.value(), quarantine_file(random, key.hex() + ".reason")).is_ok();
  }
  return moved;
}

Status DiskStore::Impl::check_attempts(const Digest& key) {
  if (!check_writable() || !writer.ensure_layout(/*thorough=*/false)) return Status::ok();
  attempts.open();
  const std::size_t deaths = attempts.deaths(key);
  if (deaths <= kDeathsAllowed) return Status::ok();
  const std::string reason =
      std::to_string(deaths) + " processes died while they loaded or first ran this kernel";
  (void)quarantine(key, reason).is_ok();
  Manifest failure;
  failure.key = key;
  failure.kind = EntryKind::kFailed;
  failure.facts["reason"] = reason;
  // The records go once the verdict stands without them.
  if (publish(failure, {})) attempts.forget(key);
  return {StatusCode::kIncompatible, key.hex() + ": " + reason};
}

Status DiskStore::Impl::remove(const Digest& key) {
  if (Status status = check_writable(); !status) return status;
  const auto tree = local.handle();
  if (tree == nullptr) return {StatusCode::kNotFound, "the store is gone"};
  const std::string name = manifest_file(local.environment(), key);
  const std::string failure = failure_file(local.environment(), key);
  const int result = files.unlink(tree->directory(), name.c_str(), false);
  const int failure_result = files.unlink(tree->directory(), failure.c_str(), false);
  if (result >= 0 || failure_result >= 0) return Status::ok();
  const int error = result == -ENOENT ? failure_result : result;
  return Status::from_errno(-error, "remove", local.full_path(name));
}

}  // namespace eagercache
