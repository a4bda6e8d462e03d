#include "kernel_cache/base/byte_fields.h"

namespace eagercache {

void put_number(std::uint64_t number, std::string* out) {
  for (int i = 0; i < 8; ++i) {
    out->push_back(static_cast<char>(number >> (8 * i) & 0xff));
  }
}

void put_text(std::string_view text, std::string* out) {
  put_number(text.size(), out);
  out->append(text);
}

bool FieldReader::number(std::uint64_t* value) {
  std::string_view bytes;
  if (!take(8, &bytes)) return false;
  *value = 0;
  for (int i = 7; i >= 0; --i) {
    *value = *value << 8 | static_cast<std::uint8_t>(bytes[static_cast<std::size_t>(i)]);
  }
  return true;
}

bool FieldReader::count(std::size_t least, std::uint64_t* value) {
  return number(value) && *value <= left_.size() / least;
}

bool FieldReader::text(std::string_view* value) {
  std::uint64_t size = 0;
  return number(&size) && take(size, value);
}

bool FieldReader::take(std::uint64_t size, std::string_view* value) {
  if (size > left_.size()) {
    left_ = {};
    return false;
  }
  *value = left_.substr(0, static_cast<std::size_t>(size));
  left_.remove_prefix(static_cast<std::size_t>(size));
  return true;
}

}  // namespace eagercache
