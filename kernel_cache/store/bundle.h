#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "kernel_cache/format/signature.h"
#include "kernel_cache/store/disk_store.h"

namespace eagercache {

// The kernels and decisions of one environment in one signed file:
//
//   bundle    = "eagercache-bundle 1" LF  public-key(32)  signature(64)  body
//   body      = text(environment)  count  count * text(manifest)  count  count * object
//   object    = digest(32)  text(content)
//   text      = length  bytes                 ; count and length: 64 bits, little-endian
//
// The signature is Ed25519's of "eagercache-bundle-v1" followed by the SHA-256 of the body.
// Manifests are those of FORMAT.md, sorted by key; objects are what they name, each once, sorted.
// Nothing follows the last object.
struct Bundle {
  PublicKey signer;
  std::string environment;  // the text of the environment key under which it was made
  std::vector<Manifest> manifests;
  std::map<Digest, std::string> objects;
};

// Largest file that is read or written.
inline constexpr std::uint64_t kMaxBundleBytes = std::uint64_t{4} << 30;

struct BundleCounts {
  std::uint64_t kernels = 0;
  std::uint64_t decisions = 0;
  std::uint64_t present = 0;  // keys that the store had a verdict on; theirs stays
  std::uint64_t bytes = 0;    // of the file
};

// Writes every kernel and decision of the store's environment, each object verified, under a
// temporary name and then by rename. kNotFound when the store has none.
Result<BundleCounts> write_bundle(const std::filesystem::path& path, DiskStore& store,
                                  const std::string& environment, const SigningKey& key);

// Reads a bundle whole: nothing beyond its head before the signer is known to be trusted, and
// nothing into memory before the signature is. Everything in it is checked: the signer is one of
// `trusted` and has signed these very bytes, each manifest is canonical and of the bundle's
// environment, each object is there, is what its digest says, and is needed. kRefused for an
// unknown signer or a wrong signature, kCorrupt for what is no bundle, kIncompatible for another
// version.
Result<Bundle> read_bundle(const std::filesystem::path& path,
                           const std::vector<PublicKey>& trusted);

// Publishes a bundle that was read into a store, whatever environment that is of: the caller has
// compared them. kIncompatible, before anything is written, when a kernel needs a CPU feature that
// this machine does not have.
Result<BundleCounts> import_bundle(const Bundle& bundle, DiskStore& store);

}  // namespace eagercache
