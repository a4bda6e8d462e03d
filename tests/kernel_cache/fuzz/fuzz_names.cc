// A name that is parsed is one that its parts build.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kernel_cache/format/file_names.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view name(reinterpret_cast<const char*>(data), size);
  const auto parsed = eagercache::parse_name(name);
  if (!parsed) return 0;
  if (parsed->kind == eagercache::NameKind::kManifest &&
      eagercache::manifest_file(parsed->environment, parsed->digest) != name) {
    std::abort();
  }
  if (parsed->kind == eagercache::NameKind::kObject &&
      eagercache::object_file(parsed->object_kind, parsed->digest) != name) {
    std::abort();
  }
  if (name.find("..") != std::string_view::npos &&
      parsed->kind != eagercache::NameKind::kQuarantined) {
    std::abort();
  }
  return 0;
}
