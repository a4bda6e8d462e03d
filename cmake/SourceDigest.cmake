# Writes OUTPUT: a C++ file with the SHA-256 of all C++ sources of the layers under ROOT, in whatever folder, by
# name and content. Run as a script: cmake -D ROOT=... -D OUTPUT=... -P SourceDigest.cmake
set(lines "")
foreach(layer IN ITEMS dispatcher guards kernel_cache python_hooks)
  file(GLOB_RECURSE sources RELATIVE "${ROOT}" "${ROOT}/${layer}/*.cc" "${ROOT}/${layer}/*.h")
  foreach(source IN LISTS sources)
    file(SHA256 "${ROOT}/${source}" content)
    string(APPEND lines "${source} ${content}\n")
  endforeach()
endforeach()
string(SHA256 digest "${lines}")
file(WRITE "${OUTPUT}" "#include \"dispatcher/base/source_digest.h\"

namespace eagercache {
const char* source_digest() noexcept { return \"${digest}\"; }
}  // namespace eagercache
")
