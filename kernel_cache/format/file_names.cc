#include "kernel_cache/format/file_names.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <ctime>
#include <vector>

namespace eagercache {
namespace {

constexpr std::size_t kEnvironmentDigits = 16;

bool is_hex(std::string_view text) noexcept {
  return std::all_of(text.begin(), text.end(), [](char digit) {
    return (digit >= '0' && digit <= '9') || (digit >= 'a' && digit <= 'f');
  });
}

std::string hex(std::uint64_t value, std::size_t digits) {
  std::string text(digits, '0');
  for (std::size_t i = 0; i < digits; ++i) {
    text[digits - 1 - i] = "0123456789abcdef"[(value >> (4 * i)) & 15];
  }
  return text;
}

// Exactly the digits that the builder writes: no sign, no leading zero, nothing behind.
template <typename Integer>
std::optional<Integer> parse_number(std::string_view text, int base) {
  Integer value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::string fanned_out(std::string_view folder, const Digest& digest) {
  const std::string name = digest.hex();
  return std::string(folder) + "/" + name.substr(0, 2) + "/" + name;
}

std::string read_small_file(const char* path) {
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  std::array<char, 256> buffer;
  const ssize_t size = ::read(fd, buffer.data(), buffer.size());
  ::close(fd);
  return size > 0 ? std::string(buffer.data(), static_cast<std::size_t>(size)) : std::string();
}

std::uint64_t random_word() noexcept {
  std::uint64_t word = 0;
  // Short only before the kernel's pool is ready, and then a repeat costs one failed O_EXCL.
  if (::getrandom(&word, sizeof word, GRND_NONBLOCK) != sizeof word) {
    timespec time{};
    ::clock_gettime(CLOCK_MONOTONIC, &time);
    word = static_cast<std::uint64_t>(time.tv_nsec) << 32 ^ static_cast<std::uint64_t>(time.tv_sec);
  }
  return word;
}

// A process id means something only within one boot and one process-id namespace of one host.
std::uint32_t this_machine() {
  static const std::uint32_t value = [] {
    std::array<char, 256> host{};
    ::gethostname(host.data(), host.size() - 1);
    struct stat name_space {};
    ::stat("/proc/self/ns/pid", &name_space);
    Hasher hasher("eagercache-machine-v1");
    hasher.add_text(host.data());
    hasher.add_text(read_small_file("/proc/sys/kernel/random/boot_id"));
    const std::array<std::uint64_t, 1> words{name_space.st_ino};
    hasher.add_words(words);
    const Digest digest = hasher.finish();
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < sizeof word; ++i) word = word << 8 | digest.bytes[i];
    return word;
  }();
  return value;
}

std::string temporary_leaf(const TemporaryName& name) {
  std::string leaf(name.is_directory ? "d-" : "f-");
  leaf.append(hex(name.machine, 8)).append("-");
  leaf.append(std::to_string(name.process)).append("-");
  leaf.append(std::to_string(name.thread)).append("-");
  leaf.append(hex(name.random, 16));
  return leaf;
}

std::optional<TemporaryName> parse_temporary(std::string_view leaf) {
  const auto parts = split(leaf, '-');
  if (parts.size() != 5 || (parts[0] != "f" && parts[0] != "d")) return std::nullopt;
  const auto machine = parse_number<std::uint32_t>(parts[1], 16);
  const auto process = parse_number<std::uint32_t>(parts[2], 10);
  const auto thread = parse_number<std::uint32_t>(parts[3], 10);
  const auto random = parse_number<std::uint64_t>(parts[4], 16);
  if (!machine || !process || !thread || !random) return std::nullopt;
  return TemporaryName{*machine, *process, *thread, *random, parts[0] == "d"};
}

std::optional<ParsedName> parse_object(std::string_view leaf) {
  ParsedName parsed;
  parsed.kind = NameKind::kObject;
  for (const ObjectKind kind : {ObjectKind::kSharedObject, ObjectKind::kCubin}) {
    const std::string suffix = std::string(".").append(object_kind_name(kind));
    if (!leaf.ends_with(suffix)) continue;
    const auto digest = Digest::from_hex(leaf.substr(0, leaf.size() - suffix.size()));
    if (!digest) return std::nullopt;
    parsed.digest = *digest;
    parsed.object_kind = kind;
    return parsed;
  }
  return std::nullopt;
}

// What the parts look like; whether they are canonical is for the caller to see.
std::optional<ParsedName> parse_parts(const std::vector<std::string_view>& parts) {
  ParsedName parsed;
  const std::string_view leaf = parts.back();
  if (parts.size() == 1) {
    parsed.environment = parts[0];
    return parsed;
  }
  if (parts[0] == kLocksDirectory && parts.size() == 2) {
    parsed.kind = NameKind::kLock;
    return is_fan_out(leaf) || leaf == "evict" ? std::optional(parsed) : std::nullopt;
  }
  if (parts[0] == kTemporaryDirectory && parts.size() == 2) {
    const auto temporary = parse_temporary(leaf);
    if (!temporary) return std::nullopt;
    parsed.kind = NameKind::kTemporary;
    parsed.temporary = *temporary;
    return parsed;
  }
  if (parts[0] == kQuarantineDirectory && parts.size() == 2) {
    parsed.kind = NameKind::kQuarantined;
    const bool well_formed = leaf.size() > 17 && is_hex(leaf.substr(0, 16)) && leaf[16] == '-';
    return well_formed ? std::optional(parsed) : std::nullopt;
  }
  if (parts[0] == kObjectsDirectory && parts.size() == 3) return parse_object(leaf);
  if (parts[1] == kAttemptsDirectory && parts.size() == 3) {
    const auto owner = parse_temporary(leaf);
    if (!owner) return std::nullopt;
    parsed.kind = NameKind::kAttempts;
    parsed.environment = parts[0];
    parsed.temporary = *owner;
    return parsed;
  }

  const auto key = Digest::from_hex(leaf);
  if (!key || parts.size() < 3) return std::nullopt;
  parsed.environment = parts[0];
  parsed.digest = *key;
  if (parts[1] == kManifestsDirectory && parts.size() == 4) {
    parsed.kind = NameKind::kManifest;
    return parsed;
  }
  if (parts[1] == kFailuresDirectory && parts.size() == 3) {
    parsed.kind = NameKind::kFailure;
    return parsed;
  }
  return std::nullopt;
}

// The name that `parsed` has; `name` itself for kinds whose parser leaves nothing to compare.
std::string rebuild(const ParsedName& parsed, std::string_view name) {
  switch (parsed.kind) {
    case NameKind::kEnvironment:
      return parsed.environment;
    case NameKind::kManifest:
      return manifest_file(parsed.environment, parsed.digest);
    case NameKind::kFailure:
      return failure_file(parsed.environment, parsed.digest);
    case NameKind::kObject:
      return object_file(parsed.object_kind, parsed.digest);
    case NameKind::kTemporary:
      return temporary_file(parsed.temporary);
    case NameKind::kAttempts:
      return attempt_file(parsed.environment, parsed.temporary);
    case NameKind::kLock:
    case NameKind::kQuarantined:
      break;
  }
  return std::string(name);
}

}  // namespace

std::string environment_id_of(std::string_view environment_text) {
  return sha256(environment_text).hex().substr(0, kEnvironmentDigits);
}

std::string environment_file(std::string_view environment) {
  return std::string(environment) + "/ENV";
}

std::string environment_folder(std::string_view environment, std::string_view place) {
  return std::string(environment) + "/" + std::string(place);
}

std::string manifest_file(std::string_view environment, const Digest& key) {
  return fanned_out(environment_folder(environment, kManifestsDirectory), key);
}

std::string failure_file(std::string_view environment, const Digest& key) {
  return environment_folder(environment, kFailuresDirectory) + "/" + key.hex();
}

std::string object_file(ObjectKind kind, const Digest& digest) {
  return fanned_out(kObjectsDirectory, digest) + "." + std::string(object_kind_name(kind));
}

std::string lock_file(const Digest& key) {
  return std::string(kLocksDirectory) + "/" + hex(key.bytes[0], 2);
}

TemporaryName new_temporary_name(bool is_directory) {
  return {this_machine(), static_cast<std::uint32_t>(::getpid()),
          static_cast<std::uint32_t>(::gettid()), random_word(), is_directory};
}

bool owner_is_dead(const TemporaryName& name) noexcept {
  if (name.machine != this_machine()) return false;
  return ::kill(static_cast<pid_t>(name.process), 0) != 0 && errno == ESRCH;
}

std::string temporary_file(const TemporaryName& name) {
  return std::string(kTemporaryDirectory) + "/" + temporary_leaf(name);
}

std::string attempt_file(std::string_view environment, const TemporaryName& owner) {
  return environment_folder(environment, kAttemptsDirectory) + "/" + temporary_leaf(owner);
}

std::string quarantine_file(std::uint64_t random, std::string_view leaf) {
  return std::string(kQuarantineDirectory) + "/" + hex(random, 16) + "-" + std::string(leaf);
}

std::optional<ParsedName> parse_name(std::string_view name) {
  auto parsed = parse_parts(split(name, '/'));
  // One check for every way to misspell a name: it must be what we would have written.
  if (!parsed || rebuild(*parsed, name) != name) return std::nullopt;
  const bool has_environment =
      parsed->kind == NameKind::kEnvironment || parsed->kind == NameKind::kManifest ||
      parsed->kind == NameKind::kFailure || parsed->kind == NameKind::kAttempts;
  if (has_environment && !is_environment_id(parsed->environment)) return std::nullopt;
  return parsed;
}

bool is_environment_id(std::string_view text) noexcept {
  return text.size() == kEnvironmentDigits && is_hex(text);
}

bool is_fan_out(std::string_view text) noexcept { return text.size() == 2 && is_hex(text); }

}  // namespace eagercache
