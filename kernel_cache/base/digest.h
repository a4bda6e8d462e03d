#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace eagercache {

// A SHA-256 value: an entry's key, an object's name, a manifest's self-check.
struct Digest {
  std::array<std::uint8_t, 32> bytes{};

  // 64 lower-case hexadecimal digits.
  std::string hex() const;
  static std::optional<Digest> from_hex(std::string_view text) noexcept;
  friend bool operator==(const Digest&, const Digest&) = default;
  friend auto operator<=>(const Digest&, const Digest&) = default;
};

// SHA-256 by OpenSSL's libcrypto. Thread-safe; allocates only inside libcrypto.
Digest sha256(std::span<const std::byte> data);
Digest sha256(std::string_view data);

// SHA-256 of what comes in pieces.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void add(std::string_view bytes);
  // The digest of everything added. Call once.
  Digest finish();

 private:
  void* context_;  // EVP_MD_CTX, owned
};

// Whether there is a libcrypto to hash and sign with, which is so wherever one is linked. Without
// it the first use ends the process.
bool libcrypto_is_there() noexcept;

// For who hashes in threads that the end of the process does not wait for. Where nobody has used
// libcrypto before, it does not clean up at exit; where somebody has, its clean-up has been
// registered when this returns, and runs after whatever is registered with atexit() from now on.
void prepare_libcrypto() noexcept;

// Incremental form. Every field is fed with a type tag and a length, so that no two different
// field sequences give the same bytes ("ab","c" is not "a","bc").
class Hasher {
 public:
  // `domain` separates uses of the hash ("eagercache-entry-v1").
  explicit Hasher(std::string_view domain);
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  void add_text(std::string_view text);
  void add_words(std::span<const std::uint64_t> words);
  // The digest of everything added. Call once.
  Digest finish();

 private:
  void* context_;  // EVP_MD_CTX, owned
};

}  // namespace eagercache
