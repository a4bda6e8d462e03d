#include "kernel_cache/format/signing_rules.h"

#include <algorithm>
#include <array>
#include <ctime>
#include <limits>

namespace eagercache {
namespace {

// Clocks of two machines differ by less.
constexpr std::int64_t kClockSlack = std::int64_t{24} * 3600;

Status refused(const std::filesystem::path& path, const std::string& why) {
  return {StatusCode::kRefused, path.string() + " " + why};
}

bool take_time(FieldReader& reader, std::int64_t* seconds) {
  std::uint64_t number = 0;
  if (!reader.number(&number) || number > std::numeric_limits<std::int64_t>::max()) return false;
  *seconds = static_cast<std::int64_t>(number);
  return true;
}

}  // namespace

std::int64_t SigningRules::seconds_now() noexcept { return std::time(nullptr); }

Status check_signer(const std::filesystem::path& path, const PublicKey& signer,
                    const SigningRules& rules) {
  if (std::ranges::find(rules.trusted, signer) == rules.trusted.end()) {
    return refused(path, "is signed by the key " + signer.hex() +
                             ", which is not among those that are trusted");
  }
  if (rules.revoked.contains(signer.bytes)) {
    return refused(path, "is signed by the key " + signer.hex() +
                             ", which is revoked; get one that another key signed");
  }
  return Status::ok();
}

Status check_validity(const std::filesystem::path& path, const Digest& digest,
                      const Validity& validity, const SigningRules& rules) {
  if (rules.revoked.contains(digest.bytes)) {
    return refused(path, "(digest " + digest.hex() + ") is revoked; get a newer one");
  }
  // In this order no sum overflows.
  if (validity.created > rules.now && validity.created - rules.now > kClockSlack) {
    return refused(path, "says that it was made on " + date_text(validity.created) +
                             ", and this machine's clock says " + date_text(rules.now) +
                             "; set the clock of the machine that is wrong, and make it again "
                             "where that is the other one");
  }
  if (validity.expires != 0 && validity.expires <= rules.now) {
    return refused(path, "expired on " + date_text(validity.expires) + "; get a newer one");
  }
  return Status::ok();
}

Result<Validity> validity_to_sign(const Validity& wanted) {
  Validity validity = wanted;
  if (validity.created == 0) validity.created = SigningRules::seconds_now();
  if (validity.created < 0 || validity.expires < 0 ||
      (validity.expires != 0 && validity.expires <= validity.created)) {
    return Status(StatusCode::kInvalidArgument, "a signed file must expire after it was made (" +
                                                    date_text(validity.created) + "), not on " +
                                                    date_text(validity.expires));
  }
  return validity;
}

void put_validity(const Validity& validity, std::string* out) {
  put_number(static_cast<std::uint64_t>(validity.created), out);
  put_number(static_cast<std::uint64_t>(validity.expires), out);
}

bool take_validity(FieldReader& reader, Validity* validity) {
  return take_time(reader, &validity->created) && take_time(reader, &validity->expires);
}

std::string date_text(std::int64_t seconds) {
  const std::time_t time = seconds;
  std::tm parts{};
  std::array<char, 64> text{};
  if (::gmtime_r(&time, &parts) == nullptr ||
      std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts) == 0) {
    return std::to_string(seconds) + " s after 1970";
  }
  return text.data();
}

}  // namespace eagercache
