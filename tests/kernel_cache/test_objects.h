#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernel_cache/loading/shared_library.h"

namespace eagercache {

inline std::string read_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.native());
  // By blocks: under a sanitizer, an iterator takes 15 s for a program's own file.
  std::ostringstream bytes;
  bytes << file.rdbuf();
  return std::move(bytes).str();
}

inline void write_bytes(const std::filesystem::path& path, const std::string& bytes) {
  std::filesystem::remove(path);
  std::ofstream file(path, std::ios::binary);
  file << bytes;
  if (!file.flush()) throw std::runtime_error("cannot write " + path.native());
}

// One of the objects of objects/CMakeLists.txt, by target name.
inline std::filesystem::path test_object(const std::string& name) {
  return std::filesystem::path(EAGERCACHE_TEST_OBJECTS) / (name + ".so");
}

// A shared object whose answer() returns `number`; another number is another content.
inline std::string answer_object(std::uint64_t number) {
  static const std::string original = read_bytes(test_object("object_answer"));
  const std::size_t marker = original.find("EAGERCACHE-NUMBR");
  if (marker == std::string::npos) throw std::runtime_error("object_answer has no marker");
  std::string bytes = original;
  std::memcpy(bytes.data() + marker + 16, &number, sizeof number);
  return bytes;
}

// What the loaded library answers. Throws when it has no answer().
inline std::uint64_t ask(const SharedLibrary& library) {
  auto* const answer = reinterpret_cast<std::uint64_t (*)()>(library.symbol("answer"));
  if (answer == nullptr) throw std::runtime_error("the library has no answer()");
  return answer();
}

}  // namespace eagercache
