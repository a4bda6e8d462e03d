#include "kernel_cache/base/utf8.h"

#include <cstddef>
#include <cstdint>

namespace eagercache {
namespace {

struct Lead {
  std::size_t length;  // bytes of the sequence; 0 for a byte that cannot start one
  std::uint8_t low;    // smallest second byte
  std::uint8_t high;   // largest second byte
};

Lead lead_of(std::uint8_t byte) noexcept {
  if (byte < 0x80) return {1, 0, 0};
  if (byte >= 0xc2 && byte <= 0xdf) return {2, 0x80, 0xbf};
  if (byte == 0xe0) return {3, 0xa0, 0xbf};
  if (byte == 0xed) return {3, 0x80, 0x9f};
  if (byte >= 0xe1 && byte <= 0xef) return {3, 0x80, 0xbf};
  if (byte == 0xf0) return {4, 0x90, 0xbf};
  if (byte >= 0xf1 && byte <= 0xf3) return {4, 0x80, 0xbf};
  if (byte == 0xf4) return {4, 0x80, 0x8f};
  return {0, 0, 0};
}

}  // namespace

bool is_utf8(std::string_view text) noexcept {
  std::size_t position = 0;
  while (position < text.size()) {
    const Lead lead = lead_of(static_cast<std::uint8_t>(text[position]));
    if (lead.length == 0 || lead.length > text.size() - position) return false;
    for (std::size_t i = 1; i < lead.length; ++i) {
      const auto byte = static_cast<std::uint8_t>(text[position + i]);
      const std::uint8_t low = i == 1 ? lead.low : 0x80;
      const std::uint8_t high = i == 1 ? lead.high : 0xbf;
      if (byte < low || byte > high) return false;
    }
    position += lead.length;
  }
  return true;
}

}  // namespace eagercache
