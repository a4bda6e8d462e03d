// The text form of a manifest, as FORMAT.md describes it.
//
// Reading is strict by construction: the reader below is lenient about order and spelling, and
// decode_manifest then accepts a text only when writing its result again gives the same bytes. So
// there is one spelling of every manifest, and the writer is its only definition.
#include "kernel_cache/format/manifest.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "kernel_cache/base/utf8.h"

namespace eagercache {
namespace {

// Version history of the manifest's text:
//   1  first version
//   2  with the environment
constexpr int kManifestVersion = 2;
constexpr std::string_view kMagic = "eagercache-manifest ";
constexpr std::string_view kDigestField = "digest ";
constexpr std::size_t kDigestLine = kDigestField.size() + 64 + 1;

constexpr std::size_t kMaxObjects = 64;
constexpr std::size_t kMaxNameLength = 64;

constexpr std::array<std::pair<EntryKind, std::string_view>, 3> kEntryKinds{
    {{EntryKind::kKernel, "kernel"},
     {EntryKind::kNative, "native"},
     {EntryKind::kFailed, "failed"}}};
constexpr std::array<std::pair<ObjectKind, std::string_view>, 2> kObjectKinds{
    {{ObjectKind::kSharedObject, "so"}, {ObjectKind::kCubin, "cubin"}}};
constexpr std::array<std::pair<FailureClass, std::string_view>, 2> kFailureClasses{
    {{FailureClass::kDeterministic, "deterministic"}, {FailureClass::kTransient, "transient"}}};

template <typename Value, std::size_t kSize>
std::optional<Value> value_of(const std::array<std::pair<Value, std::string_view>, kSize>& table,
                              std::string_view name) {
  for (const auto& [value, spelling] : table) {
    if (spelling == name) return value;
  }
  return std::nullopt;
}

template <typename Value, std::size_t kSize>
std::string_view name_of(const std::array<std::pair<Value, std::string_view>, kSize>& table,
                         Value wanted) noexcept {
  for (const auto& [value, spelling] : table) {
    if (value == wanted) return spelling;
  }
  return "unknown";
}

bool is_name(std::string_view text) noexcept {
  return !text.empty() && text.size() <= kMaxNameLength &&
         std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '.';
         });
}

bool needs_escape(char c) noexcept {
  const auto byte = static_cast<unsigned char>(c);
  return byte < 0x20 || byte == 0x7f || c == '\\';
}

std::string escape(std::string_view value) {
  std::string text;
  text.reserve(value.size());
  for (const char c : value) {
    if (!needs_escape(c)) {
      text.push_back(c);
    } else {
      const auto byte = static_cast<unsigned char>(c);
      text.append("\\x");
      text.push_back("0123456789abcdef"[byte >> 4]);
      text.push_back("0123456789abcdef"[byte & 15]);
    }
  }
  return text;
}

std::optional<std::string> unescape(std::string_view text) {
  std::string value;
  value.reserve(text.size());
  while (!text.empty()) {
    if (text[0] != '\\') {
      value.push_back(text[0]);
      text.remove_prefix(1);
      continue;
    }
    if (text.size() < 4 || text[1] != 'x') return std::nullopt;
    unsigned int byte = 0;
    const auto [end, error] = std::from_chars(text.data() + 2, text.data() + 4, byte, 16);
    if (error != std::errc{} || end != text.data() + 4) return std::nullopt;
    value.push_back(static_cast<char>(byte));
    text.remove_prefix(4);
  }
  return value;
}

template <typename Integer>
std::optional<Integer> parse_number(std::string_view text) {
  Integer value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Cuts what is before the first space off the front of `text`, the space included.
std::string_view next_word(std::string_view& text) {
  const std::size_t end = text.find(' ');
  const std::string_view word = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return word;
}

Status corrupt(std::string_view what) {
  return {StatusCode::kCorrupt, "manifest: " + std::string(what)};
}

Status invalid(std::string_view what) {
  return {StatusCode::kInvalidArgument, "manifest: " + std::string(what)};
}

bool read_object(std::string_view rest, Manifest& manifest) {
  const auto kind = value_of(kObjectKinds, next_word(rest));
  const auto digest = Digest::from_hex(next_word(rest));
  const auto size = parse_number<std::uint64_t>(rest);
  if (!kind || !digest || !size || manifest.objects.size() == kMaxObjects) return false;
  manifest.objects.push_back({*kind, *digest, *size});
  return true;
}

bool read_fact(std::string_view rest, Manifest& manifest) {
  const std::string_view name = next_word(rest);
  auto value = unescape(rest);
  return value && manifest.facts.emplace(name, std::move(*value)).second;
}

// One line into its field; false when the field is unknown or malformed.
bool read_line(std::string_view line, Manifest& manifest) {
  const std::string_view field = next_word(line);
  const auto assign = [](auto& target, auto value) {
    if (!value) return false;
    target = *value;
    return true;
  };
  if (field == "key") return assign(manifest.key, Digest::from_hex(line));
  if (field == "environment") return assign(manifest.environment, Digest::from_hex(line));
  if (field == "kind") return assign(manifest.kind, value_of(kEntryKinds, line));
  if (field == "created") return assign(manifest.created, parse_number<std::int64_t>(line));
  if (field == "failure") return assign(manifest.failure, value_of(kFailureClasses, line));
  if (field == "retry_after") {
    return assign(manifest.retry_after, parse_number<std::int64_t>(line));
  }
  if (field == "object") return read_object(line, manifest);
  if (field == "fact") return read_fact(line, manifest);
  if (field == "cpu") {
    manifest.cpu_features.emplace_back(line);
    return true;
  }
  return false;
}

Status check(const Manifest& manifest) {
  const bool kernel = manifest.kind == EntryKind::kKernel;
  if (kernel == manifest.objects.empty()) return invalid("kernels have objects, others have none");
  if (manifest.objects.size() > kMaxObjects) return invalid("too many objects");
  const bool transient = manifest.failure == FailureClass::kTransient;
  if (transient && manifest.kind != EntryKind::kFailed) {
    return invalid("only failures have a failure class");
  }
  if (manifest.retry_after != 0 && !transient) {
    return invalid("only transient failures have a retry time");
  }
  for (const std::string& feature : manifest.cpu_features) {
    if (!is_name(feature)) return invalid("malformed name of a CPU feature");
  }
  for (const auto& [name, value] : manifest.facts) {
    if (!is_name(name)) return invalid("malformed name of a fact");
    if (!is_utf8(value)) return invalid("fact " + name + " is not UTF-8");
  }
  return Status::ok();
}

}  // namespace

std::string_view entry_kind_name(EntryKind kind) noexcept { return name_of(kEntryKinds, kind); }

std::string_view object_kind_name(ObjectKind kind) noexcept { return name_of(kObjectKinds, kind); }

Result<std::string> encode_manifest(const Manifest& manifest) {
  if (Status status = check(manifest); !status) return status;
  std::string text(kMagic);
  const auto line = [&text](std::initializer_list<std::string_view> words) {
    for (const std::string_view word : words) text.append(word);
    text.push_back('\n');
  };
  line({std::to_string(kManifestVersion)});
  line({"key ", manifest.key.hex()});
  line({"environment ", manifest.environment.hex()});
  line({"kind ", entry_kind_name(manifest.kind)});
  line({"created ", std::to_string(manifest.created)});
  if (manifest.kind == EntryKind::kFailed) {
    line({"failure ", name_of(kFailureClasses, manifest.failure)});
    line({"retry_after ", std::to_string(manifest.retry_after)});
  }
  for (const ObjectRef& object : manifest.objects) {
    line({"object ", object_kind_name(object.kind), " ", object.digest.hex(), " ",
          std::to_string(object.size)});
  }
  for (const std::string& feature : manifest.cpu_features) line({"cpu ", feature});
  for (const auto& [name, value] : manifest.facts) {
    if (value.size() > kMaxManifestBytes) return invalid("fact " + name + " is too long");
    line({"fact ", name, " ", escape(value)});
  }
  line({kDigestField, sha256(text).hex()});
  if (text.size() > kMaxManifestBytes) return invalid("longer than the format allows");
  return text;
}

Result<Manifest> decode_manifest(std::string_view text) {
  if (text.size() > kMaxManifestBytes) return corrupt("longer than the format allows");
  if (text.size() < kMagic.size() + kDigestLine || !text.starts_with(kMagic)) {
    return corrupt("does not begin and end as one");
  }
  std::string_view body = text.substr(0, text.size() - kDigestLine);
  std::string_view seal = text.substr(body.size());
  if (!seal.starts_with(kDigestField) || seal.back() != '\n' || body.back() != '\n') {
    return corrupt("no digest line");
  }
  seal = seal.substr(kDigestField.size(), 64);
  if (Digest::from_hex(seal) != sha256(body)) return corrupt("digest differs");

  // Only an intact text may speak of its version: a flipped bit there is damage, not the future.
  body.remove_prefix(kMagic.size());
  const std::string_view version = body.substr(0, body.find('\n'));
  if (version != std::to_string(kManifestVersion)) {
    return Status(StatusCode::kIncompatible, "manifest: format version " + std::string(version));
  }
  body.remove_prefix(version.size() + 1);

  Manifest manifest;
  while (!body.empty()) {
    const std::string_view line = body.substr(0, body.find('\n'));
    if (!read_line(line, manifest)) return corrupt("malformed line");
    body.remove_prefix(line.size() + 1);
  }
  const Result<std::string> canonical = encode_manifest(manifest);
  if (!canonical || canonical.value() != text) return corrupt("not in canonical form");
  return manifest;
}

}  // namespace eagercache
