#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kernel_cache/base/digest.h"
#include "kernel_cache/format/manifest.h"

namespace eagercache {

// Every name in a store, built and parsed here and nowhere else. FORMAT.md explains them. All names
// but kFormatFile are relative to ROOT/kVersionDirectory.

inline constexpr char kFormatFile[] = "FORMAT";
inline constexpr char kVersionDirectory[] = "v1";
inline constexpr char kObjectsDirectory[] = "o";
inline constexpr char kLocksDirectory[] = "l";
inline constexpr char kTemporaryDirectory[] = "t";
inline constexpr char kQuarantineDirectory[] = "q";
inline constexpr char kManifestsDirectory[] = "m";  // below an environment's directory
inline constexpr char kFailuresDirectory[] = "n";   // likewise
inline constexpr char kAttemptsDirectory[] = "a";   // likewise
inline constexpr char kEvictionLock[] = "l/evict";

// The directory of an environment: the first 16 hexadecimal digits of its text's SHA-256.
std::string environment_id_of(std::string_view environment_text);
std::string environment_file(std::string_view environment);

// `place` below an environment: "<environment>/m" for kManifestsDirectory.
std::string environment_folder(std::string_view environment, std::string_view place);
std::string manifest_file(std::string_view environment, const Digest& key);
std::string failure_file(std::string_view environment, const Digest& key);
std::string object_file(ObjectKind kind, const Digest& digest);
// One of 256, by the key's first byte.
std::string lock_file(const Digest& key);

// Who made a temporary file, so that a clean-up can tell a dead owner's from a slow one's.
struct TemporaryName {
  std::uint32_t machine = 0;  // host, boot and process-id namespace, hashed
  std::uint32_t process = 0;
  std::uint32_t thread = 0;
  std::uint64_t random = 0;
  bool is_directory = false;
  friend bool operator==(const TemporaryName&, const TemporaryName&) = default;
};

// A name of this thread that was never used before.
TemporaryName new_temporary_name(bool is_directory);
// True when the maker ran on this machine and is no more. False when that cannot be known.
bool owner_is_dead(const TemporaryName& name) noexcept;
std::string temporary_file(const TemporaryName& name);
// The record of the process that `owner` names.
std::string attempt_file(std::string_view environment, const TemporaryName& owner);
// `leaf` is the last component of what is put aside; `random` keeps two of the same name apart.
std::string quarantine_file(std::uint64_t random, std::string_view leaf);

// What a file of the store is, which its path alone says.
enum class NameKind {
  kEnvironment,
  kManifest,
  kFailure,
  kAttempts,
  kObject,
  kLock,
  kTemporary,
  kQuarantined,
};

// A path of the store, taken apart. Fields that the kind has no use for are empty.
struct ParsedName {
  NameKind kind = NameKind::kEnvironment;
  std::string environment;  // kEnvironment, kManifest, kFailure, kAttempts
  Digest digest;            // kManifest and kFailure: the key; kObject: the content's
  ObjectKind object_kind = ObjectKind::kSharedObject;  // kObject
  TemporaryName temporary;                             // kTemporary, kAttempts
};

// The inverse of the functions above; nothing for any name that they cannot have built.
std::optional<ParsedName> parse_name(std::string_view name);

bool is_environment_id(std::string_view text) noexcept;
// Two lower-case hexadecimal digits: a fan-out directory or a lock file.
bool is_fan_out(std::string_view text) noexcept;

}  // namespace eagercache
