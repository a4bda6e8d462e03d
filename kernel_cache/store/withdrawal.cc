#include "kernel_cache/store/withdrawal.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "kernel_cache/format/signing_rules.h"

namespace eagercache {
namespace {

constexpr const char* kBundle = "bundle";
constexpr const char* kSigner = "signer";
constexpr const char* kExpires = "expires";
constexpr const char* kUntried = "untried";

// Nothing where the fact is no time.
std::optional<std::int64_t> expiry_of(const Manifest& manifest) {
  const std::string text = manifest.fact(kExpires);
  std::int64_t seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  return error == std::errc{} && end == text.data() + text.size() ? std::optional(seconds)
                                                                  : std::nullopt;
}

bool is_revoked(const Manifest& manifest, const char* fact, const Revocations& revoked) {
  const std::optional<Digest> id = Digest::from_hex(manifest.fact(fact));
  return id && revoked.contains(id->bytes);
}

}  // namespace

void note_origin(const Origin& origin, Manifest* manifest) {
  std::int64_t expires = origin.expires;
  if (manifest->facts.contains(kExpires)) {
    const std::int64_t before = expiry_of(*manifest).value_or(1);
    expires = expires == 0 ? before : std::min(expires, before);
  }
  manifest->facts[kBundle] = origin.bundle.hex();
  manifest->facts[kSigner] = origin.signer.hex();
  if (expires != 0) {
    manifest->facts[kExpires] = std::to_string(expires);
  }
}

std::string withdrawal_of(const Manifest& manifest, const Revocations& revoked, std::int64_t now) {
  const auto said = [&manifest](const std::string& why) {
    return "kernels that " + manifest.fact(kBundle) +
           " brought (a bundle, or an entry of a remote) " + "are not used any more: " + why +
           "; import a newer one";
  };
  if (is_revoked(manifest, kSigner, revoked)) {
    return said("the key that signed it, " + manifest.fact(kSigner) + ", is revoked");
  }
  if (is_revoked(manifest, kBundle, revoked)) {
    return said("it is revoked");
  }
  if (manifest.facts.contains(kExpires)) {
    const std::optional<std::int64_t> expires = expiry_of(manifest);
    if (!expires) return said("when it expires cannot be read");
    if (*expires <= now) return said("it expired on " + date_text(*expires));
  }
  if (is_untried(manifest)) return "another kind of machine made it, and it was not tried here";
  return {};
}

void note_untried(const std::string& what, Manifest* manifest) { manifest->facts[kUntried] = what; }

bool is_untried(const Manifest& manifest) { return manifest.facts.contains(kUntried); }

Manifest without_untried(Manifest manifest) {
  manifest.facts.erase(kUntried);
  return manifest;
}

}  // namespace eagercache
