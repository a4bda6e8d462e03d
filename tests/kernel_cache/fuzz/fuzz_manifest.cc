// Whatever is decoded is canonical. Each input is tried as it is, and as a body with a right digest
// line, because no fuzzer guesses a digest.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "kernel_cache/format/manifest.h"

namespace {

void check(std::string_view text) {
  const auto decoded = eagercache::decode_manifest(text);
  if (!decoded) return;
  const auto encoded = eagercache::encode_manifest(decoded.value());
  if (!encoded || encoded.value() != text) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string text(reinterpret_cast<const char*>(data), size);
  check(text);
  text += "digest " + eagercache::sha256(text).hex() + "\n";
  check(text);
  return 0;
}
