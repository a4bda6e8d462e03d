#include "kernel_cache/format/signature.h"

#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <utility>

#include "kernel_cache/base/byte_fields.h"
#include "kernel_cache/base/digest.h"

namespace eagercache {
namespace {

struct FreeBio {
  void operator()(BIO* bio) const noexcept { BIO_free_all(bio); }
};
using Bio = std::unique_ptr<BIO, FreeBio>;

struct FreeContext {
  void operator()(EVP_MD_CTX* context) const noexcept { EVP_MD_CTX_free(context); }
};
using Context = std::unique_ptr<EVP_MD_CTX, FreeContext>;

struct FreeKey {
  void operator()(EVP_PKEY* key) const noexcept { EVP_PKEY_free(key); }
};
using Key = std::unique_ptr<EVP_PKEY, FreeKey>;

struct FreeKeyContext {
  void operator()(EVP_PKEY_CTX* context) const noexcept { EVP_PKEY_CTX_free(context); }
};

// Not by EVP_PKEY_Q_keygen, which libcrypto 1.1 does not have.
Key new_key() {
  const std::unique_ptr<EVP_PKEY_CTX, FreeKeyContext> context(
      EVP_PKEY_CTX_new_id(EVP_PKEY_ED25519, nullptr));
  EVP_PKEY* key = nullptr;
  if (!context || EVP_PKEY_keygen_init(context.get()) != 1 ||
      EVP_PKEY_keygen(context.get(), &key) != 1) {
    return nullptr;
  }
  return Key(key);
}

// A file that asks for a passphrase is refused instead of asking the terminal.
int no_passphrase(char* /*buffer*/, int /*size*/, int /*writing*/, void* /*data*/) { return -1; }

Bio open_file(const std::filesystem::path& path, const char* mode) {
  return Bio(BIO_new_file(path.c_str(), mode));
}

Status no_file(const std::filesystem::path& path) {
  return Status(StatusCode::kIoError, "the key " + path.string() + " cannot be read");
}

Result<PublicKey> public_part(EVP_PKEY* key, const std::filesystem::path& path, const char* what) {
  PublicKey result;
  std::size_t size = result.bytes.size();
  if (key == nullptr || EVP_PKEY_id(key) != EVP_PKEY_ED25519 ||
      EVP_PKEY_get_raw_public_key(key, result.bytes.data(), &size) != 1 ||
      size != result.bytes.size()) {
    return Status(StatusCode::kInvalidArgument, path.string() + " is no " + what +
                                                    " of Ed25519 in PEM; make a pair with "
                                                    "`eagercache bundle keygen`");
  }
  return result;
}

// A new file of our own; never one that is there.
Status write_new(const std::filesystem::path& path, mode_t mode,
                 const std::function<bool(BIO*)>& write) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  if (fd < 0) {
    return Status::from_errno(errno, "create", path.string());
  }
  const Bio bio(BIO_new_fd(fd, BIO_CLOSE));
  if (!bio || !write(bio.get()) || BIO_flush(bio.get()) != 1) {
    ::unlink(path.c_str());
    return Status(StatusCode::kIoError, path.string() + " cannot be written");
  }
  return Status::ok();
}

}  // namespace

std::string PublicKey::hex() const {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

void SigningKey::Free::operator()(void* key) const noexcept {
  EVP_PKEY_free(static_cast<EVP_PKEY*>(key));
}

Result<SigningKey> SigningKey::read(const std::filesystem::path& path) {
  const Bio file = open_file(path, "r");
  if (!file) {
    return no_file(path);
  }
  Handle handle(PEM_read_bio_PrivateKey(file.get(), nullptr, &no_passphrase, nullptr));
  Result<PublicKey> own =
      public_part(static_cast<EVP_PKEY*>(handle.get()), path, "private key (without passphrase)");
  if (!own) {
    return own.status();
  }
  return SigningKey(std::move(handle), own.value());
}

Status SigningKey::make(const std::filesystem::path& private_path,
                        const std::filesystem::path& public_path) {
  const Key key = new_key();
  if (!key) {
    return Status(StatusCode::kUnsupported, "OpenSSL makes no key");
  }
  Status status = write_new(private_path, 0600, [&key](BIO* bio) {
    return PEM_write_bio_PKCS8PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr) ==
           1;
  });
  if (!status) {
    return status;
  }
  status = write_new(public_path, 0644,
                     [&key](BIO* bio) { return PEM_write_bio_PUBKEY(bio, key.get()) == 1; });
  if (!status) {
    ::unlink(private_path.c_str());
  }
  return status;
}

Result<Signature> SigningKey::sign(std::string_view message) const {
  const Context context(EVP_MD_CTX_new());
  Signature signature;
  std::size_t size = signature.bytes.size();
  auto* const key = static_cast<EVP_PKEY*>(handle_.get());
  if (!context || EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, key) != 1 ||
      EVP_DigestSign(context.get(), signature.bytes.data(), &size,
                     reinterpret_cast<const unsigned char*>(message.data()), message.size()) != 1 ||
      size != signature.bytes.size()) {
    return Status(StatusCode::kUnsupported, "OpenSSL signs nothing");
  }
  return signature;
}

Result<PublicKey> read_public_key(const std::filesystem::path& path) {
  const Bio file = open_file(path, "r");
  if (!file) {
    return no_file(path);
  }
  const Key key(PEM_read_bio_PUBKEY(file.get(), nullptr, &no_passphrase, nullptr));
  return public_part(key.get(), path, "public key");
}

bool is_signed_by(const PublicKey& key, const Signature& signature, std::string_view message) {
  const Key handle(
      EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, key.bytes.data(), key.bytes.size()));
  const Context context(EVP_MD_CTX_new());
  return handle && context &&
         EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, handle.get()) == 1 &&
         EVP_DigestVerify(context.get(), signature.bytes.data(), signature.bytes.size(),
                          reinterpret_cast<const unsigned char*>(message.data()),
                          message.size()) == 1;
}

std::string digest_message(std::string_view domain, std::string_view body) {
  return digest_message(domain, sha256(body));
}

std::string digest_message(std::string_view domain, const Digest& body) {
  std::string message(domain);
  put_bytes(body.bytes, &message);
  return message;
}

}  // namespace eagercache
