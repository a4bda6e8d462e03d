#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "kernel_cache/format/signature.h"
#include "kernel_cache/format/signing_rules.h"
#include "kernel_cache/store/disk_store.h"

namespace eagercache {

// The kernels and decisions of one environment in one signed file:
//
//   bundle    = "eagercache-bundle 2" LF  public-key(32)  signature(64)  body
//   body      = created  expires  text(environment)  count  count * text(manifest)  count  count *
//   object object    = digest(32)  text(content) text      = length  bytes                 ;
//   numbers: 64 bits, little-endian
//
// The signature is Ed25519's of "eagercache-bundle-v2" followed by the SHA-256 of the body, which
// is the bundle's digest. Times are seconds since 1970; one that expires at 0 never does. Manifests
// are those of FORMAT.md, sorted by key; objects are what they name, each once, sorted. Nothing
// follows the last object.
struct Bundle {
  PublicKey signer;
  Digest digest;
  Validity validity;
  std::string environment;  // the text of the environment key under which it was made
  std::vector<Manifest> manifests;
  std::map<Digest, std::string> objects;
};

// Largest file that is read or written.
inline constexpr std::uint64_t kMaxBundleBytes = std::uint64_t{4} << 30;

// What was written into a bundle, or taken from one.
struct BundleCounts {
  std::uint64_t kernels = 0;
  std::uint64_t decisions = 0;
  std::uint64_t present = 0;  // keys that the store had a verdict on; theirs stays
  std::uint64_t bytes = 0;    // of the file
  Digest digest;              // of the bundle
};

// Writes every kernel and decision of the store's environment that is not withdrawn, each object
// verified, under a temporary name and then by rename. A creation time of 0 is the time of writing.
// kNotFound when the store has none.
Result<BundleCounts> write_bundle(const std::filesystem::path& path, DiskStore& store,
                                  const std::string& environment, const SigningKey& key,
                                  const Validity& validity = {});

// Reads a bundle whole: nothing beyond its head before the signer is known to be trusted, and
// nothing into memory before the signature is. Everything in it is checked: the signer is one of
// the trusted ones and has signed these very bytes, it is not revoked and has not expired,
// each manifest is canonical and of the bundle's environment, each object is there, is what its
// digest says, and is needed. kRefused for what the rules do not take or a wrong signature,
// kCorrupt for what is no bundle, kIncompatible for another version.
Result<Bundle> read_bundle(const std::filesystem::path& path, const SigningRules& rules);

// Publishes a bundle that was read into a store, whatever environment that is of: the caller has
// compared them. The entries say which bundle they are of, who signed it and when it expires
// (withdrawal.h). kIncompatible, before anything is written, when a kernel needs a CPU feature that
// this machine does not have.
Result<BundleCounts> import_bundle(const Bundle& bundle, DiskStore& store);

}  // namespace eagercache
