#pragma once

// Which operators are hooked where nobody names any. Constant data.

#include <span>
#include <string_view>

namespace eagercache {

// Operators that enable() hooks when no list is given, as "aten::name.overload": those where a
// compiled kernel is known to win or tie somewhere. Which of them get a kernel is still measured,
// key by key. Names that a version of torch does not have, or that are not eligible at a
// dispatch key, are left out there. No views, random or data-dependent operators, no library calls,
// none that checks values.
std::span<const std::string_view> default_operators() noexcept;

// Those that are among them on CUDA alone.
std::span<const std::string_view> more_default_operators_on_cuda() noexcept;

}  // namespace eagercache
