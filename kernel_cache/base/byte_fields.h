#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace eagercache {

// The fields that signed files are made of: numbers of 64 bits, little-endian, and texts behind
// their length.

void put_number(std::uint64_t number, std::string* out);
void put_text(std::string_view text, std::string* out);
template <std::size_t kSize>
void put_bytes(const std::array<std::uint8_t, kSize>& bytes, std::string* out) {
  out->append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Takes fields off the front of bytes, which must outlive it; a length is compared with what is
// left before it is used. False, and nothing more can be read, where they end in a field.
class FieldReader {
 public:
  explicit FieldReader(std::string_view bytes) : left_(bytes) {}

  bool number(std::uint64_t* value);
  // A number of things of at least `least` bytes each: never more than can be left.
  bool count(std::size_t least, std::uint64_t* value);
  bool text(std::string_view* value);
  template <std::size_t kSize>
  bool bytes(std::array<std::uint8_t, kSize>* value) {
    std::string_view found;
    if (!take(kSize, &found)) return false;
    std::copy(found.begin(), found.end(), value->begin());
    return true;
  }
  bool at_end() const noexcept { return left_.empty(); }
  std::string_view rest() const noexcept { return left_; }

 private:
  bool take(std::uint64_t size, std::string_view* value);
  std::string_view left_;
};

}  // namespace eagercache
