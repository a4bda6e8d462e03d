#pragma once

#include <string_view>

// Proof that tests watch every rule: a build with EAGERCACHE_MUTATIONS leaves out the one rule that
// the environment variable EAGERCACHE_MUTATE names, and a test that tests/hazards.json names for it
// must fail (scripts/mutate). In every other build nothing of this is there.
namespace eagercache {

#if defined(EAGERCACHE_MUTATIONS)
inline constexpr bool kMutations = true;
// `kind` "field" and `name` "TensorDtype" make EAGERCACHE_MUTATE=field.TensorDtype.
bool left_out(std::string_view kind, std::string_view name) noexcept;
#else
inline constexpr bool kMutations = false;
constexpr bool left_out(std::string_view /*kind*/, std::string_view /*name*/) noexcept {
  return false;
}
#endif

}  // namespace eagercache
