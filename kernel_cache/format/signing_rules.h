#pragma once

// Whose signed files are taken, and until when. Plain data that callers make for one read.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "kernel_cache/base/byte_fields.h"
#include "kernel_cache/base/digest.h"
#include "kernel_cache/base/status.h"
#include "kernel_cache/format/revocations.h"
#include "kernel_cache/format/signature.h"

namespace eagercache {

// When a signed file holds, in seconds since 1970.
struct Validity {
  std::int64_t created = 0;
  std::int64_t expires = 0;  // 0: never
  friend bool operator==(const Validity&, const Validity&) = default;
};

// Which signed files a reader takes.
struct SigningRules {
  std::vector<PublicKey> trusted;
  Revocations revoked;
  std::int64_t now = seconds_now();

  static std::int64_t seconds_now() noexcept;
};

// kRefused, with the key, unless it is trusted and not revoked. `path` is the file, in messages.
Status check_signer(const std::filesystem::path& path, const PublicKey& signer,
                    const SigningRules& rules);

// kRefused for a file of that digest that is revoked, has expired, or says that it was made more
// than a day ahead of the clock.
Status check_validity(const std::filesystem::path& path, const Digest& digest,
                      const Validity& validity, const SigningRules& rules);

// What a writer signs: `wanted`, with the present for a creation time of 0. kInvalidArgument where
// it would have expired by then.
Result<Validity> validity_to_sign(const Validity& wanted);

// The two numbers at the front of what is signed.
void put_validity(const Validity& validity, std::string* out);
// False for what is no time.
bool take_validity(FieldReader& reader, Validity* validity);

// "2026-01-31 12:00:00 UTC"
std::string date_text(std::int64_t seconds);

}  // namespace eagercache
