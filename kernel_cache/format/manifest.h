#pragma once

// One entry of the store as data, and as the text of its file (FORMAT.md). Nothing here reads or
// writes files. Any thread.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_cache/base/digest.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// What an entry says about its key.
enum class EntryKind {
  kKernel,  // a proved kernel, faster than native
  kNative,  // a decision: native stays (slower kernel, undecided timing, ...); has no objects
  kFailed,  // negative: compile or proof failed; has no objects, and a retry rule
};

enum class ObjectKind {
  kSharedObject,  // ".so": one ELF shared object
  kCubin,         // ".cubin": CUDA machine code for one architecture
};

// How a failure may be tried again. Transient failures carry `retry_after`.
enum class FailureClass { kDeterministic, kTransient };

// An object by its content: entries that need the same bytes share the file.
struct ObjectRef {
  ObjectKind kind = ObjectKind::kSharedObject;
  Digest digest;           // of the whole file; also its name in the store
  std::uint64_t size = 0;  // bytes
  friend bool operator==(const ObjectRef&, const ObjectRef&) = default;
};

// One entry: what the store answers for a key. FORMAT.md has the bytes.
struct Manifest {
  Digest key;
  // SHA-256 of the environment's text. Filled in by publish; an entry of another environment is not
  // used, wherever it lies.
  Digest environment;
  EntryKind kind = EntryKind::kNative;
  std::vector<ObjectRef> objects;
  // CPU features that the kernel's code needs, by the names of cpu_features.h. Checked against the
  // host before an object is loaded: a superset test, never a string comparison.
  std::vector<std::string> cpu_features;
  std::int64_t created = 0;                             // seconds since the epoch; informative only
  FailureClass failure = FailureClass::kDeterministic;  // kFailed only
  std::int64_t retry_after = 0;                         // seconds since the epoch; transient only
  // Free-form facts for people and for the layers above: "op", "call" (JSON), "form" (container or
  // bare), "numerics", "native_ns", "kernel_ns", "reason", ... Names are [a-z0-9_.]+, values any
  // UTF-8 text; both are stored and covered by the digest.
  std::map<std::string, std::string> facts;

  // One of them; empty where it is not there.
  std::string fact(const std::string& name) const {
    const auto found = facts.find(name);
    return found == facts.end() ? std::string() : found->second;
  }

  friend bool operator==(const Manifest&, const Manifest&) = default;
};

// Largest encoded manifest that is written or read, in bytes.
inline constexpr std::size_t kMaxManifestBytes = 64 * 1024;

// Canonical bytes: the same manifest always gives the same text. kInvalidArgument when a fact's
// name is malformed or the result would pass kMaxManifestBytes.
Result<std::string> encode_manifest(const Manifest& manifest);

// The inverse. Never trusts a length or a count; kCorrupt for anything but exactly one canonical
// manifest with a right self-digest; kIncompatible for another format version.
Result<Manifest> decode_manifest(std::string_view text);

std::string_view entry_kind_name(EntryKind kind) noexcept;
std::string_view object_kind_name(ObjectKind kind) noexcept;  // "so", "cubin"

}  // namespace eagercache
