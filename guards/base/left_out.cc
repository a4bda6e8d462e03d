#include "guards/base/left_out.h"

#if defined(EAGERCACHE_MUTATIONS)

#include <cstdlib>
#include <string>

namespace eagercache {

bool left_out(std::string_view kind, std::string_view name) noexcept {
  static const std::string kRule = [] {
    const char* const text = std::getenv("EAGERCACHE_MUTATE");
    return std::string(text == nullptr ? "" : text);
  }();
  return kRule.size() == kind.size() + 1 + name.size() && kRule.starts_with(kind) &&
         kRule[kind.size()] == '.' && kRule.ends_with(name);
}

}  // namespace eagercache

#endif
