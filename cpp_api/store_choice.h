#pragma once

// Which environment of a store a C++ program uses, and whose signatures it takes. What is given
// back is the caller's. Any thread.

#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernel_cache/base/status.h"
#include "kernel_cache/store/bundle.h"
#include "kernel_cache/store/disk_store.h"

namespace eagercache {

// The environments of a store, as their ENV files tell them.
struct StoredEnvironment {
  std::string id;    // sixteen hex digits
  std::string text;  // the environment key
  std::uint64_t entries = 0;
};

// Of the environments below `root` that `id` names (empty: of all), the one with the most entries
// whose kernels can run in this process. kNotFound without a store, kIncompatible with the fields
// that differ in the nearest environment. Reads names and ENV files alone; opening the store is
// what checks whom they belong to.
Result<StoredEnvironment> choose_environment(const std::filesystem::path& root,
                                             const std::string& id);

// The list of what is revoked that the caller names, or else EAGERCACHE_REVOKED; nothing is without
// one.
Result<Revocations> read_revoked(const std::filesystem::path& named);

// The public keys in files, and what is revoked; kInvalidArgument without any key, for what `path`
// names.
Result<SigningRules> read_signing_rules(const std::filesystem::path& path,
                                        const std::vector<std::filesystem::path>& trusted_keys,
                                        const std::filesystem::path& revoked);

// A bundle that was read and checked whole, and whose kernels can run in this process.
// kIncompatible names the fields that differ.
Result<Bundle> read_usable_bundle(const std::filesystem::path& path,
                                  const std::vector<std::filesystem::path>& trusted_keys,
                                  const std::filesystem::path& revoked);

// The entries that a policy of that tag may use, and the operators of its kernels: (operator,
// dispatch key) pairs, "aten::var.correction" and "CPU".
struct StoreContents {
  std::set<std::pair<std::string, std::string>> operators;
  std::vector<Manifest> kernels;
  std::uint64_t decisions = 0;
};
// Reads every entry of the store's environment.
Result<StoreContents> list_contents(DiskStore& store, const std::string& policy_tag);

}  // namespace eagercache
