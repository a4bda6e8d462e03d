#include "kernel_cache/store/bundle.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <system_error>
#include <utility>

#include "kernel_cache/base/byte_fields.h"
#include "kernel_cache/base/cpu_features.h"
#include "kernel_cache/base/guarded.h"
#include "kernel_cache/files/file_layer.h"
#include "kernel_cache/files/whole_file.h"
#include "kernel_cache/store/withdrawal.h"

namespace eagercache {
namespace {

constexpr std::string_view kMark = "eagercache-bundle ";
constexpr std::string_view kFirstLine = "eagercache-bundle 2\n";
constexpr std::string_view kDomain = "eagercache-bundle-v2";
constexpr std::uint64_t kPiece = std::uint64_t{1} << 20;
constexpr std::size_t kHead = kFirstLine.size() + PublicKey::kBytes + Signature::kBytes;

Status damaged(const std::filesystem::path& path, const std::string& what) {
  return Status(StatusCode::kCorrupt, path.string() + " is no whole bundle: " + what);
}

// Calls take(bytes) for pieces of `size` bytes of the file from `offset` on.
template <typename Take>
Status read_pieces(int fd, std::uint64_t offset, std::uint64_t size,
                   const std::filesystem::path& path, Take take) {
  std::string piece(static_cast<std::size_t>(std::min(size, kPiece)), '\0');
  while (size > 0) {
    const ssize_t moved = ::pread(fd, piece.data(), std::min<std::uint64_t>(size, piece.size()),
                                  static_cast<off_t>(offset));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return Status::from_errno(errno, "read", path.string());
    if (moved == 0) return damaged(path, "it ends early");
    take(std::string_view(piece.data(), static_cast<std::size_t>(moved)));
    offset += static_cast<std::uint64_t>(moved);
    size -= static_cast<std::uint64_t>(moved);
  }
  return Status::ok();
}

Result<std::uint64_t> size_of(int fd, const std::filesystem::path& path) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return Status::from_errno(errno, "ask about", path.string());
  if (!S_ISREG(info.st_mode)) return damaged(path, "it is no regular file");
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (size > kMaxBundleBytes) {
    return Status(StatusCode::kFull, path.string() + " is larger than a bundle may be");
  }
  return size;
}

// The head alone: whose signature of what. kRefused unless the rules take the signer.
Status read_head(int fd, std::uint64_t size, const std::filesystem::path& path,
                 const SigningRules& rules, PublicKey* signer, Signature* signature) {
  std::string head;
  if (Status status = read_pieces(fd, 0, std::min<std::uint64_t>(size, kHead), path,
                                  [&head](std::string_view piece) { head.append(piece); });
      !status) {
    return status;
  }
  if (!head.starts_with(kFirstLine)) {
    if (head.starts_with(kMark)) {
      return {StatusCode::kIncompatible,
              path.string() + " is a bundle of another version than this eagercache reads"};
    }
    return damaged(path, "it does not begin like one");
  }
  FieldReader reader(std::string_view(head).substr(kFirstLine.size()));
  if (!reader.bytes(&signer->bytes) || !reader.bytes(&signature->bytes)) {
    return damaged(path, "it ends in its signature");
  }
  return check_signer(path, *signer, rules);
}

// The body, once it is known to be what was signed: no memory is taken for anything else.
Result<std::string> read_signed_body(int fd, std::uint64_t size, const std::filesystem::path& path,
                                     const PublicKey& signer, const Signature& signature,
                                     Digest* signed_digest) {
  Sha256 first;
  const auto hash = [&first](std::string_view piece) { first.add(piece); };
  if (Status status = read_pieces(fd, kHead, size - kHead, path, hash); !status) {
    return status;
  }
  const Digest digest = first.finish();
  if (!is_signed_by(signer, signature, digest_message(kDomain, digest))) {
    return Status(StatusCode::kRefused,
                  path.string() + " was altered or cut off: its signature is of other bytes");
  }
  std::string body;
  body.reserve(static_cast<std::size_t>(size - kHead));
  const auto keep = [&body](std::string_view piece) { body.append(piece); };
  if (Status status = read_pieces(fd, kHead, size - kHead, path, keep); !status) {
    return status;
  }
  if (sha256(body) != digest) {
    return Status(StatusCode::kRefused, path.string() + " is being written");
  }
  *signed_digest = digest;
  return body;
}

// Complete under its name, or not there.
Status write_file(const std::filesystem::path& path, std::string_view bytes) {
  Result<WholeFile> file = WholeFile::create(path);
  if (!file) {
    return file.status();
  }
  if (Status status = file->write(bytes); !status) {
    return status;
  }
  return file->publish();
}

// Checks that the manifests and objects belong together.
Status check_contents(const std::filesystem::path& path, const Bundle& bundle) {
  const Digest environment = sha256(bundle.environment);
  std::set<Digest> keys;
  std::set<Digest> needed;
  for (const Manifest& manifest : bundle.manifests) {
    if (manifest.environment != environment) {
      return damaged(path, "an entry is of another environment than the bundle");
    }
    if (manifest.kind == EntryKind::kFailed || !keys.insert(manifest.key).second) {
      return damaged(path, "an entry is a failure, or there twice");
    }
    for (const ObjectRef& object : manifest.objects) {
      const auto found = bundle.objects.find(object.digest);
      if (found == bundle.objects.end() || found->second.size() != object.size) {
        return damaged(path, "an object of " + manifest.key.hex() + " is missing");
      }
      needed.insert(object.digest);
    }
  }
  if (needed.size() != bundle.objects.size()) {
    return damaged(path, "an object belongs to no entry");
  }
  return Status::ok();
}

Status read_body(const std::filesystem::path& path, std::string_view body,
                 const SigningRules& rules, Bundle* bundle) {
  FieldReader reader(body);
  std::string_view text;
  std::uint64_t count = 0;
  if (!take_validity(reader, &bundle->validity)) {
    return damaged(path, "it says no times");
  }
  if (Status status = check_validity(path, bundle->digest, bundle->validity, rules); !status) {
    return status;
  }
  if (!reader.text(&text)) {
    return damaged(path, "it ends in its environment");
  }
  bundle->environment = text;
  if (!reader.number(&count)) {
    return damaged(path, "it ends before its entries");
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    if (!reader.text(&text)) {
      return damaged(path, "it ends in an entry");
    }
    Result<Manifest> manifest = decode_manifest(text);
    if (!manifest) {
      return manifest.status();
    }
    bundle->manifests.push_back(std::move(manifest).value());
  }
  if (!reader.number(&count)) {
    return damaged(path, "it ends before its objects");
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    Digest digest;
    if (!reader.bytes(&digest.bytes) || !reader.text(&text)) {
      return damaged(path, "it ends in an object");
    }
    if (sha256(text) != digest) {
      return damaged(path, "the object " + digest.hex() + " has other contents");
    }
    bundle->objects.emplace(digest, text);
  }
  if (!reader.at_end()) {
    return damaged(path, "more follows its last object");
  }
  return check_contents(path, *bundle);
}

// Takes an entry and its objects in. Objects are shared; each is read once.
Status take_entry(DiskStore& store, const Manifest& manifest, Bundle* bundle) {
  for (std::size_t i = 0; i < manifest.objects.size(); ++i) {
    if (bundle->objects.contains(manifest.objects[i].digest)) continue;
    Result<std::string> content = store.read_object(manifest, i);
    if (!content) {
      return content.status();
    }
    bundle->objects.emplace(manifest.objects[i].digest, std::move(content).value());
  }
  bundle->manifests.push_back(manifest);
  return Status::ok();
}

Result<std::string> encode_body(const Bundle& bundle) {
  std::string body;
  put_validity(bundle.validity, &body);
  put_text(bundle.environment, &body);
  put_number(bundle.manifests.size(), &body);
  for (const Manifest& manifest : bundle.manifests) {
    Result<std::string> text = encode_manifest(manifest);
    if (!text) {
      return text.status();
    }
    put_text(text.value(), &body);
  }
  put_number(bundle.objects.size(), &body);
  for (const auto& [digest, content] : bundle.objects) {
    put_bytes(digest.bytes, &body);
    put_text(content, &body);
  }
  if (body.size() + kHead > kMaxBundleBytes) {
    return Status(StatusCode::kFull, "the bundle would be larger than one may be");
  }
  return body;
}

BundleCounts counts_of(const Bundle& bundle) {
  BundleCounts counts;
  for (const Manifest& manifest : bundle.manifests) {
    ++(manifest.kind == EntryKind::kKernel ? counts.kernels : counts.decisions);
  }
  return counts;
}

// The entry's objects as files in `folder`.
Result<std::vector<ObjectSource>> unpack(const Bundle& bundle, const Manifest& manifest,
                                         const std::filesystem::path& folder) {
  std::vector<ObjectSource> sources;
  for (const ObjectRef& object : manifest.objects) {
    const std::filesystem::path path = folder / object.digest.hex();
    if (!std::filesystem::exists(path)) {
      if (Status status = write_file(path, bundle.objects.at(object.digest)); !status) {
        return status;
      }
    }
    sources.push_back({object.kind, path});
  }
  return sources;
}

// The entry as a store keeps it, with what says when it is not to be used any more.
Manifest with_origin(Manifest manifest, const Bundle& bundle) {
  note_origin({bundle.digest, bundle.signer, bundle.validity.expires}, &manifest);
  return manifest;
}

}  // namespace

Result<BundleCounts> write_bundle(const std::filesystem::path& path, DiskStore& store,
                                  const std::string& environment, const SigningKey& key,
                                  const Validity& validity) {
  Bundle bundle;
  bundle.environment = environment;
  const Result<Validity> times = validity_to_sign(validity);
  if (!times) {
    return times.status();
  }
  bundle.validity = times.value();
  std::vector<Manifest> manifests;
  Status status = store.for_each(false, [&](const EntryInfo& entry) {
    if (entry.manifest.kind != EntryKind::kFailed && store.withdrawal(entry.manifest).empty()) {
      manifests.push_back(entry.manifest);
    }
  });
  if (status && manifests.empty()) {
    status =
        Status(StatusCode::kNotFound, store.root().string() +
                                          " has no kernel or decision of this environment; "
                                          "`eagercache warm`, or a program that runs, makes some");
  }
  std::ranges::sort(manifests, {}, &Manifest::key);
  for (std::size_t i = 0; status && i < manifests.size(); ++i) {
    status = take_entry(store, manifests[i], &bundle);
  }
  if (!status) {
    return status;
  }
  const Result<std::string> body = encode_body(bundle);
  if (!body) {
    return body.status();
  }
  const Result<Signature> signature = key.sign(digest_message(kDomain, body.value()));
  if (!signature) {
    return signature.status();
  }
  std::string file(kFirstLine);
  put_bytes(key.public_key().bytes, &file);
  put_bytes(signature.value().bytes, &file);
  file.append(body.value());
  if (status = write_file(path, file); !status) {
    return status;
  }
  BundleCounts counts = counts_of(bundle);
  counts.bytes = file.size();
  counts.digest = sha256(body.value());
  return counts;
}

Result<Bundle> read_bundle(const std::filesystem::path& path, const SigningRules& rules) {
  return guarded([&]() -> Result<Bundle> {
    // A pipe in its place is not waited for.
    const int flags = O_RDONLY | O_NONBLOCK | O_NOCTTY;
    const ScopedFd file(FileLayer::posix(),
                        FileLayer::posix().open(AT_FDCWD, path.c_str(), flags, 0));
    if (!file.valid()) {
      return Status::from_errno(-file.get(), "read", path.string());
    }
    const Result<std::uint64_t> size = size_of(file.get(), path);
    if (!size) {
      return size.status();
    }
    Bundle bundle;
    Signature signature;
    if (Status status =
            read_head(file.get(), size.value(), path, rules, &bundle.signer, &signature);
        !status) {
      return status;
    }
    const Result<std::string> body =
        read_signed_body(file.get(), size.value(), path, bundle.signer, signature, &bundle.digest);
    if (!body) {
      return body.status();
    }
    if (Status status = read_body(path, body.value(), rules, &bundle); !status) {
      return status;
    }
    return bundle;
  });
}

Result<BundleCounts> import_bundle(const Bundle& bundle, DiskStore& store) {
  for (const Manifest& manifest : bundle.manifests) {
    const std::string missing = missing_cpu_feature(manifest.cpu_features, host_cpu_features());
    if (!missing.empty()) {
      return Status(StatusCode::kIncompatible, "its kernels need the CPU feature " + missing +
                                                   ", which this machine does not have");
    }
  }
  const Result<std::filesystem::path> folder = store.make_work_directory();
  if (!folder) {
    return folder.status();
  }
  BundleCounts counts = counts_of(bundle);
  Status status;
  for (const Manifest& signed_manifest : bundle.manifests) {
    const Manifest manifest = with_origin(signed_manifest, bundle);
    if (const Result<Manifest> known = store.find(manifest.key);
        known && known.value().kind != EntryKind::kFailed) {
      ++counts.present;
      continue;
    }
    const Result<std::vector<ObjectSource>> sources = unpack(bundle, manifest, folder.value());
    status = sources ? store.publish(manifest, sources.value()).status() : sources.status();
    if (!status) break;
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder.value(), ignored);
  if (!status) {
    return status;
  }
  return counts;
}

}  // namespace eagercache
