// A call key that decodes has a text, and is read without looking beyond its end.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "guards/key/call_key.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<eagercache::Word> words(size / sizeof(eagercache::Word));
  if (!words.empty()) std::memcpy(words.data(), data, words.size() * sizeof words[0]);
  eagercache::DecodedCall call;
  const bool decodes = eagercache::decode_call(words, &call);
  if (decodes == eagercache::describe_call(words).empty()) std::abort();
  if (!decodes) return 0;
  eagercache::KeyBuffer again;
  if (!eagercache::encode_call(call, &again)) std::abort();
  const auto encoded = again.words();
  if (encoded.size() != words.size() ||
      std::memcmp(encoded.data(), words.data(), encoded.size_bytes()) != 0) {
    std::abort();
  }
  return 0;
}
