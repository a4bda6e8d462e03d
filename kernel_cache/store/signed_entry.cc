#include "kernel_cache/store/signed_entry.h"

#include <utility>

#include "kernel_cache/base/byte_fields.h"
#include "kernel_cache/base/digest.h"
#include "kernel_cache/base/guarded.h"
#include "kernel_cache/store/bundle.h"
#include "kernel_cache/store/withdrawal.h"

namespace eagercache {
namespace {

constexpr const char* kItself = "the entry";  // in messages, where files have their paths
constexpr std::string_view kEntryMark = "eagercache-entry ";
constexpr std::string_view kEntryFirstLine = "eagercache-entry 1\n";
constexpr std::string_view kEntryDomain = "eagercache-signed-entry-v1";

Status no_entry(const std::string& what) {
  return Status(StatusCode::kCorrupt, "it is no whole entry: " + what);
}

Status read_entry_body(std::string_view body, SignedEntry* entry) {
  FieldReader reader(body);
  std::string_view environment;
  std::string_view manifest;
  if (!take_validity(reader, &entry->validity) || !reader.text(&environment) ||
      !reader.text(&manifest) || !reader.at_end()) {
    return no_entry("its fields do not fill it");
  }
  Result<Manifest> decoded = decode_manifest(manifest);
  if (!decoded) {
    return decoded.status();
  }
  entry->environment = environment;
  entry->manifest = std::move(decoded).value();
  if (entry->manifest.environment != sha256(environment)) {
    return no_entry("its manifest is of another environment");
  }
  if (entry->manifest.kind == EntryKind::kFailed) {
    return no_entry("it is a failure");
  }
  return Status::ok();
}

}  // namespace

Result<std::string> sign_entry(const Manifest& manifest, const std::string& environment,
                               const SigningKey& key, const Validity& wanted) {
  if (manifest.kind == EntryKind::kFailed || manifest.environment != sha256(environment)) {
    return Status(StatusCode::kInvalidArgument,
                  manifest.key.hex() + " is a failure, or of another environment");
  }
  const Result<std::string> text = encode_manifest(without_untried(manifest));
  if (!text) {
    return text.status();
  }
  const Result<Validity> validity = validity_to_sign(wanted);
  if (!validity) {
    return validity.status();
  }
  std::string body;
  put_validity(validity.value(), &body);
  put_text(environment, &body);
  put_text(text.value(), &body);
  const Result<Signature> signature = key.sign(digest_message(kEntryDomain, body));
  if (!signature) {
    return signature.status();
  }
  std::string entry(kEntryFirstLine);
  put_bytes(key.public_key().bytes, &entry);
  put_bytes(signature.value().bytes, &entry);
  entry += body;
  if (entry.size() > kMaxSignedEntryBytes) {
    return Status(StatusCode::kFull, manifest.key.hex() + " is larger than an entry may be");
  }
  return entry;
}

Result<SignedEntry> read_entry(std::string_view bytes, const SigningRules& rules) {
  return guarded([&]() -> Result<SignedEntry> {
    if (bytes.size() > kMaxSignedEntryBytes) {
      return no_entry("it is larger than one may be");
    }
    if (!bytes.starts_with(kEntryFirstLine)) {
      if (bytes.starts_with(kEntryMark)) {
        return Status(StatusCode::kIncompatible,
                      "it is an entry of another version than this eagercache reads");
      }
      return no_entry("it does not begin like one");
    }
    FieldReader reader(bytes.substr(kEntryFirstLine.size()));
    SignedEntry entry;
    Signature signature;
    if (!reader.bytes(&entry.signer.bytes) || !reader.bytes(&signature.bytes)) {
      return no_entry("it ends in its signature");
    }
    if (Status status = check_signer(kItself, entry.signer, rules); !status) {
      return status;
    }
    if (!is_signed_by(entry.signer, signature, digest_message(kEntryDomain, reader.rest()))) {
      return Status(StatusCode::kRefused,
                    "it was altered or cut off: its signature is of other bytes");
    }
    entry.digest = sha256(reader.rest());
    if (Status status = read_entry_body(reader.rest(), &entry); !status) {
      return status;
    }
    if (Status status = check_validity(kItself, entry.digest, entry.validity, rules); !status) {
      return status;
    }
    return entry;
  });
}

Result<bool> import_entry(const SignedEntry& entry, const std::vector<std::string>& objects,
                          DiskStore& store, const std::string& untried) {
  return guarded([&]() -> Result<bool> {
    // What another machine signed says nothing about this one.
    Manifest manifest = without_untried(entry.manifest);
    if (!untried.empty()) {
      if (store.find_untried(manifest.key)) return false;
      note_untried(untried, &manifest);
    }
    Bundle bundle;
    bundle.signer = entry.signer;
    bundle.digest = entry.digest;
    bundle.validity = entry.validity;
    bundle.environment = entry.environment;
    bundle.manifests.push_back(std::move(manifest));
    if (objects.size() != entry.manifest.objects.size()) {
      return no_entry("it comes with another number of objects than it names");
    }
    for (std::size_t i = 0; i < objects.size(); ++i) {
      const ObjectRef& named = entry.manifest.objects[i];
      if (objects[i].size() != named.size || sha256(objects[i]) != named.digest) {
        return no_entry("the object " + named.digest.hex() + " has other contents");
      }
      bundle.objects.emplace(named.digest, objects[i]);
    }
    const Result<BundleCounts> counts = import_bundle(bundle, store);
    if (!counts) {
      return counts.status();
    }
    return counts->present == 0;
  });
}

}  // namespace eagercache
