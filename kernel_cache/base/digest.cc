#include "kernel_cache/base/digest.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <cstdlib>

namespace eagercache {
namespace {

constexpr char kHexDigits[] = "0123456789abcdef";
constexpr std::uint8_t kTextTag = 'T';
constexpr std::uint8_t kWordsTag = 'W';

int hex_value(char digit) noexcept {
  if (digit >= '0' && digit <= '9') return digit - '0';
  if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
  return -1;
}

// libcrypto refuses SHA-256 only when it has no memory or its configuration forbids the algorithm.
// A store without a hash would be worse than none: there is nothing to go on with.
void require(bool succeeded) noexcept {
  if (!succeeded) std::abort();
}

std::array<std::uint8_t, 8> little_endian(std::uint64_t value) noexcept {
  std::array<std::uint8_t, 8> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::uint8_t>(value >> (8 * i));
  }
  return bytes;
}

void update(void* context, const void* data, std::size_t size) noexcept {
  require(EVP_DigestUpdate(static_cast<EVP_MD_CTX*>(context), data, size) == 1);
}

Digest finish_digest(void* context) {
  Digest digest;
  unsigned int size = 0;
  require(EVP_DigestFinal_ex(static_cast<EVP_MD_CTX*>(context), digest.bytes.data(), &size) == 1 &&
          size == digest.bytes.size());
  return digest;
}

void start_field(void* context, std::uint8_t tag, std::uint64_t length) noexcept {
  update(context, &tag, 1);
  const auto bytes = little_endian(length);
  update(context, bytes.data(), bytes.size());
}

// Fetched once: the implicit fetch of EVP_sha256() takes libcrypto's locks at every use, which a
// child forked at the wrong moment would find held. Leaked: used by threads that outlive static
// destructors.
const EVP_MD* algorithm() noexcept {
  static const EVP_MD* const fetched = [] {
#if OPENSSL_VERSION_NUMBER >= 0x30000000L
    // None in a wheel whose system has libcrypto 1.1 (system_libcrypto.cc).
    const EVP_MD* const of_provider = EVP_MD_fetch(nullptr, "SHA256", nullptr);
    return of_provider != nullptr ? of_provider : EVP_sha256();
#else
    return EVP_sha256();
#endif
  }();
  require(fetched != nullptr);
  return fetched;
}

}  // namespace

std::string Digest::hex() const {
  std::string text;
  text.reserve(2 * bytes.size());
  for (const std::uint8_t byte : bytes) {
    text.push_back(kHexDigits[byte >> 4]);
    text.push_back(kHexDigits[byte & 15]);
  }
  return text;
}

std::optional<Digest> Digest::from_hex(std::string_view text) noexcept {
  Digest digest;
  if (text.size() != 2 * digest.bytes.size()) return std::nullopt;
  for (std::size_t i = 0; i < digest.bytes.size(); ++i) {
    const int high = hex_value(text[2 * i]);
    const int low = hex_value(text[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    digest.bytes[i] = static_cast<std::uint8_t>(16 * high + low);
  }
  return digest;
}

Digest sha256(std::span<const std::byte> data) {
  Digest digest;
  unsigned int size = 0;
  require(EVP_Digest(data.data(), data.size(), digest.bytes.data(), &size, algorithm(), nullptr) ==
              1 &&
          size == digest.bytes.size());
  return digest;
}

Digest sha256(std::string_view data) {
  return sha256(std::as_bytes(std::span<const char>(data.data(), data.size())));
}

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  require(context_ != nullptr &&
          EVP_DigestInit_ex(static_cast<EVP_MD_CTX*>(context_), algorithm(), nullptr) == 1);
}

Sha256::~Sha256() { EVP_MD_CTX_free(static_cast<EVP_MD_CTX*>(context_)); }

void Sha256::add(std::string_view bytes) { update(context_, bytes.data(), bytes.size()); }

Digest Sha256::finish() { return finish_digest(context_); }

#ifndef EAGERCACHE_PORTABLE  // otherwise in system_libcrypto.cc
bool libcrypto_is_there() noexcept { return true; }
#endif

void prepare_libcrypto() noexcept {
  require(OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr) == 1);
  algorithm();
}

Hasher::Hasher(std::string_view domain) : context_(EVP_MD_CTX_new()) {
  require(context_ != nullptr &&
          EVP_DigestInit_ex(static_cast<EVP_MD_CTX*>(context_), algorithm(), nullptr) == 1);
  add_text(domain);
}

Hasher::~Hasher() { EVP_MD_CTX_free(static_cast<EVP_MD_CTX*>(context_)); }

void Hasher::add_text(std::string_view text) {
  start_field(context_, kTextTag, text.size());
  update(context_, text.data(), text.size());
}

void Hasher::add_words(std::span<const std::uint64_t> words) {
  start_field(context_, kWordsTag, words.size());
  for (const std::uint64_t word : words) {
    const auto bytes = little_endian(word);
    update(context_, bytes.data(), bytes.size());
  }
}

Digest Hasher::finish() { return finish_digest(context_); }

}  // namespace eagercache
