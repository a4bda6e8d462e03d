#pragma once

// What the store asks of the processor and its system, in one place. The rest of what is of x86-64
// is listed in ARCHITECTURE.md ("Processors").

#include <elf.h>

#include <cstdint>
#include <string_view>

namespace eagercache {

#if defined(__x86_64__)
inline constexpr std::uint16_t kElfMachine = EM_X86_64;
inline constexpr std::string_view kElfLoader = "ld-linux-x86-64.so.2";
#elif defined(__aarch64__)
inline constexpr std::uint16_t kElfMachine = EM_AARCH64;
inline constexpr std::string_view kElfLoader = "ld-linux-aarch64.so.1";
#else
#error "eagercache does not know this processor: name its ELF machine and its loader here."
#endif

}  // namespace eagercache
