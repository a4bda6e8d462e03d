#pragma once

#include <string_view>

namespace eagercache {

// Whether `text` is well-formed UTF-8 (RFC 3629: no overlong form, no surrogate, at most U+10FFFF).
bool is_utf8(std::string_view text) noexcept;

}  // namespace eagercache
