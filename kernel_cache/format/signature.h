#pragma once

// Who signed what. A key's bytes are copied, and a private key is OpenSSL's object, which is freed
// with ours. Any thread.

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "kernel_cache/base/digest.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// Ed25519 (RFC 8032) by OpenSSL's libcrypto. Keys are PEM files, as `openssl genpkey -algorithm
// ed25519` and `openssl pkey -pubout` make them.
struct PublicKey {
  static constexpr std::size_t kBytes = 32;
  std::array<std::uint8_t, kBytes> bytes{};

  // 64 lower-case hexadecimal digits.
  std::string hex() const;
  friend bool operator==(const PublicKey&, const PublicKey&) = default;
};

struct Signature {
  static constexpr std::size_t kBytes = 64;
  std::array<std::uint8_t, kBytes> bytes{};
};

// A private key in memory. Movable; never copied.
class SigningKey {
 public:
  // kInvalidArgument when the file holds no Ed25519 private key without a passphrase.
  static Result<SigningKey> read(const std::filesystem::path& path);
  // Makes a pair and writes it, the private one with mode 0600. Never replaces a file.
  static Status make(const std::filesystem::path& private_path,
                     const std::filesystem::path& public_path);

  const PublicKey& public_key() const noexcept { return public_key_; }
  Result<Signature> sign(std::string_view message) const;

 private:
  struct Free {
    void operator()(void* key) const noexcept;
  };
  using Handle = std::unique_ptr<void, Free>;  // EVP_PKEY
  SigningKey(Handle handle, const PublicKey& public_key)
      : handle_(std::move(handle)), public_key_(public_key) {}

  Handle handle_;
  PublicKey public_key_;
};

// kInvalidArgument when the file holds no Ed25519 public key.
Result<PublicKey> read_public_key(const std::filesystem::path& path);

// Whether `signature` is the key's of exactly this message.
bool is_signed_by(const PublicKey& key, const Signature& signature, std::string_view message);

// What is signed of a file: `domain`, which tells uses of a key apart, and the SHA-256 of `body`.
std::string digest_message(std::string_view domain, std::string_view body);
std::string digest_message(std::string_view domain, const Digest& body);

}  // namespace eagercache
