#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>

#include "kernel_cache/base/status.h"

namespace eagercache {

// Signing keys and signed files that are not to be used any more. A value; reads are thread-safe.
//
// The list is a text with one of them a line: 64 hexadecimal digits, a public key's or a file's
// digest as `eagercache bundle verify` prints them. What follows a space is a note. Empty lines and
// those that begin with '#' are passed over.
class Revocations {
 public:
  using Id = std::array<std::uint8_t, 32>;

  // None.
  Revocations() = default;
  // kInvalidArgument for a line that is none of these, kRefused for what is no regular file or is
  // larger than a list may be. Nothing that is signed may be used then: what is revoked is unknown.
  static Result<Revocations> read(const std::filesystem::path& path);
  // Of a text that `name` names in messages.
  static Result<Revocations> parse(std::string_view text, std::string_view name);

  bool contains(const Id& id) const { return ids_.contains(id); }
  bool empty() const noexcept { return ids_.empty(); }

 private:
  std::set<Id> ids_;
};

// Largest list that is read, in bytes.
inline constexpr std::uint64_t kMaxRevocationBytes = std::uint64_t{16} << 20;

}  // namespace eagercache
