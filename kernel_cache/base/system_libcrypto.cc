// In a wheel for older systems (EAGERCACHE_PORTABLE) nothing is linked to libcrypto: no version of
// it is on all of them, and a copy of our own nobody would keep up to date. What is used of it is
// defined here, and calls the libcrypto that the system has, 3 or 1.1. A function that is missing
// below ends the link.

#include <dlfcn.h>
#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/pem.h>

#include <cstdio>
#include <cstdlib>

#include "kernel_cache/base/digest.h"

namespace eagercache {
namespace {

void* library() noexcept {
  // Where Python or the program has loaded one of these, it is that one.
  static void* const loaded = [] {
    void* const newest = ::dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
    return newest != nullptr ? newest : ::dlopen("libcrypto.so.1.1", RTLD_NOW | RTLD_LOCAL);
  }();
  return loaded;
}

[[noreturn]] void nothing() {
  std::fputs("eagercache needs OpenSSL's libcrypto.so.3 or .so.1.1, which is not to be found\n",
             stderr);
  std::abort();
}

void* find_if_there(const char* name) noexcept {
  return library() == nullptr ? nullptr : ::dlsym(library(), name);
}

// What is called in place of a function that is not there says so and ends the process, as a
// library that is linked and is not there does.
void* find(const char* name) noexcept {
  void* const there = find_if_there(name);
  return there != nullptr ? there : reinterpret_cast<void*>(&nothing);
}

}  // namespace

bool libcrypto_is_there() noexcept { return library() != nullptr; }

}  // namespace eagercache

// Looked up when this library is loaded: a lock that is taken at the first call would be found held
// in a child that is forked at the wrong moment.
#define EAGERCACHE_FORWARD(result, name, parameters, arguments)                           \
  namespace {                                                                             \
  const auto found_##name = reinterpret_cast<decltype(&::name)>(eagercache::find(#name)); \
  }                                                                                       \
  extern "C" __attribute__((visibility("hidden"))) result name parameters {               \
    return found_##name arguments;                                                        \
  }

EAGERCACHE_FORWARD(long, BIO_ctrl, (BIO * bio, int command, long number, void* pointer),
                   (bio, command, number, pointer))
EAGERCACHE_FORWARD(void, BIO_free_all, (BIO * bio), (bio))
EAGERCACHE_FORWARD(BIO*, BIO_new_fd, (int fd, int close), (fd, close))
EAGERCACHE_FORWARD(BIO*, BIO_new_file, (const char* path, const char* mode), (path, mode))
EAGERCACHE_FORWARD(int, EVP_Digest,
                   (const void* data, std::size_t size, unsigned char* result,
                    unsigned int* result_size, const EVP_MD* type, ENGINE* engine),
                   (data, size, result, result_size, type, engine))
EAGERCACHE_FORWARD(int, EVP_DigestFinal_ex,
                   (EVP_MD_CTX * context, unsigned char* result, unsigned int* size),
                   (context, result, size))
EAGERCACHE_FORWARD(int, EVP_DigestInit_ex,
                   (EVP_MD_CTX * context, const EVP_MD* type, ENGINE* engine),
                   (context, type, engine))
EAGERCACHE_FORWARD(int, EVP_DigestSign,
                   (EVP_MD_CTX * context, unsigned char* result, std::size_t* result_size,
                    const unsigned char* data, std::size_t size),
                   (context, result, result_size, data, size))
EAGERCACHE_FORWARD(int, EVP_DigestSignInit,
                   (EVP_MD_CTX * context, EVP_PKEY_CTX** key_context, const EVP_MD* type,
                    ENGINE* engine, EVP_PKEY* key),
                   (context, key_context, type, engine, key))
EAGERCACHE_FORWARD(int, EVP_DigestUpdate,
                   (EVP_MD_CTX * context, const void* data, std::size_t size),
                   (context, data, size))
EAGERCACHE_FORWARD(int, EVP_DigestVerify,
                   (EVP_MD_CTX * context, const unsigned char* signature,
                    std::size_t signature_size, const unsigned char* data, std::size_t size),
                   (context, signature, signature_size, data, size))
EAGERCACHE_FORWARD(int, EVP_DigestVerifyInit,
                   (EVP_MD_CTX * context, EVP_PKEY_CTX** key_context, const EVP_MD* type,
                    ENGINE* engine, EVP_PKEY* key),
                   (context, key_context, type, engine, key))
EAGERCACHE_FORWARD(void, EVP_MD_CTX_free, (EVP_MD_CTX * context), (context))
EAGERCACHE_FORWARD(EVP_MD_CTX*, EVP_MD_CTX_new, (), ())
EAGERCACHE_FORWARD(const EVP_MD*, EVP_sha256, (), ())
EAGERCACHE_FORWARD(void, EVP_PKEY_CTX_free, (EVP_PKEY_CTX * context), (context))
EAGERCACHE_FORWARD(EVP_PKEY_CTX*, EVP_PKEY_CTX_new_id, (int type, ENGINE* engine), (type, engine))
EAGERCACHE_FORWARD(void, EVP_PKEY_free, (EVP_PKEY * key), (key))
EAGERCACHE_FORWARD(int, EVP_PKEY_get_raw_public_key,
                   (const EVP_PKEY* key, unsigned char* result, std::size_t* size),
                   (key, result, size))
EAGERCACHE_FORWARD(int, EVP_PKEY_keygen, (EVP_PKEY_CTX * context, EVP_PKEY** key), (context, key))
EAGERCACHE_FORWARD(int, EVP_PKEY_keygen_init, (EVP_PKEY_CTX * context), (context))
EAGERCACHE_FORWARD(EVP_PKEY*, EVP_PKEY_new_raw_public_key,
                   (int type, ENGINE* engine, const unsigned char* bytes, std::size_t size),
                   (type, engine, bytes, size))
EAGERCACHE_FORWARD(int, OPENSSL_init_crypto,
                   (std::uint64_t options, const OPENSSL_INIT_SETTINGS* settings),
                   (options, settings))
EAGERCACHE_FORWARD(EVP_PKEY*, PEM_read_bio_PUBKEY,
                   (BIO * bio, EVP_PKEY** key, pem_password_cb* callback, void* data),
                   (bio, key, callback, data))
EAGERCACHE_FORWARD(EVP_PKEY*, PEM_read_bio_PrivateKey,
                   (BIO * bio, EVP_PKEY** key, pem_password_cb* callback, void* data),
                   (bio, key, callback, data))
EAGERCACHE_FORWARD(int, PEM_write_bio_PKCS8PrivateKey,
                   (BIO * bio, const EVP_PKEY* key, const EVP_CIPHER* cipher,
                    const char* passphrase, int size, pem_password_cb* callback, void* data),
                   (bio, key, cipher, passphrase, size, callback, data))
EAGERCACHE_FORWARD(int, PEM_write_bio_PUBKEY, (BIO * bio, const EVP_PKEY* key), (bio, key))

#if OPENSSL_VERSION_NUMBER >= 0x30000000L

// These two are in libcrypto 3 alone, under these names.
namespace {
void* const found_fetch = eagercache::find_if_there("EVP_MD_fetch");
void* const found_id = eagercache::find_if_there("EVP_PKEY_get_id");
const auto found_older_id =
    reinterpret_cast<decltype(&::EVP_PKEY_get_id)>(eagercache::find("EVP_PKEY_id"));
}  // namespace

extern "C" {

__attribute__((visibility("hidden"))) EVP_MD* EVP_MD_fetch(OSSL_LIB_CTX* context, const char* name,
                                                           const char* properties) {
  if (found_fetch == nullptr) {
    return nullptr;
  }
  return reinterpret_cast<decltype(&::EVP_MD_fetch)>(found_fetch)(context, name, properties);
}

__attribute__((visibility("hidden"))) int EVP_PKEY_get_id(const EVP_PKEY* key) {
  return found_id == nullptr ? found_older_id(key)
                             : reinterpret_cast<decltype(&::EVP_PKEY_get_id)>(found_id)(key);
}
}

#endif
