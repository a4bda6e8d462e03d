// The ELF check never reads outside its buffer, whatever is in it.
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernel_cache/loading/elf_check.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  (void)eagercache::check_elf(std::as_bytes(std::span<const std::uint8_t>(data, size))).is_ok();
  return 0;
}
