#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_cache/format/signing_rules.h"
#include "kernel_cache/store/disk_store.h"

namespace eagercache {

// One kernel or decision as it travels between machines, without the objects that it names:
//
//   entry = "eagercache-entry 1" LF  public-key(32)  signature(64)  body
//   body  = created(8)  expires(8)  text(environment)  text(manifest)
//           ; fields of bundles, FORMAT.md section 8
//
// The signature is Ed25519's of "eagercache-signed-entry-v1" followed by the SHA-256 of the body.
// It vouches for the objects too, because the manifest names them by digest and size.
struct SignedEntry {
  PublicKey signer;
  Digest digest;  // the body's, by which it can be revoked
  Validity validity;
  std::string environment;  // the text of the environment key under which it was made
  Manifest manifest;
};

// Largest entry that is written or read: an environment's text and a manifest.
inline constexpr std::size_t kMaxSignedEntryBytes = std::size_t{256} << 10;

// The bytes of a store's entry, of the environment whose text this is. What is untried here is
// signed as it came: who reads it tries it. kInvalidArgument for a
// failure, which is no other machine's business, for another environment's entry, and for a
// validity that ends before it begins.
Result<std::string> sign_entry(const Manifest& manifest, const std::string& environment,
                               const SigningKey& key, const Validity& wanted = {});

// Reads what anybody may have sent. Checked in this order: the size, the signer, the signature,
// every field, then its times. kRefused for a signer that the rules do not take, a wrong signature,
// and what is revoked or has expired; kCorrupt for what is no entry, kIncompatible for another
// version.
Result<SignedEntry> read_entry(std::string_view bytes, const SigningRules& rules);

// Publishes an entry with the contents of its objects, in the manifest's order, into a store of
// whatever environment: the caller has compared them. The entry says who signed it and when it
// expires (withdrawal.h), and what is to be tried before it is used, where `untried` names that:
// another kind of machine made it. False when the store had a verdict, which stays. kCorrupt,
// before anything is written, when a content is not what the manifest names; kIncompatible when the
// kernel needs a CPU feature that this machine does not have.
Result<bool> import_entry(const SignedEntry& entry, const std::vector<std::string>& objects,
                          DiskStore& store, const std::string& untried = {});

}  // namespace eagercache
