#include "kernel_cache/loading/shared_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <string>
#include <unordered_map>

#include "kernel_cache/base/fork_guard.h"

namespace eagercache {
namespace {

constexpr std::size_t kMaxLibraries = 2000;
// A small library takes five mappings, and the process needs most of its maps for other things.
constexpr std::size_t kMapsPerLibrary = 5;
constexpr std::size_t kShareOfMaps = 4;
constexpr std::size_t kDefaultMapCount = 65530;

// Path to handle; nullptr while another thread opens it. Guarded by process_mutex(). Leaked: code
// in the libraries may run after static destructors.
std::unordered_map<std::string, void*>& table_locked() {
  static auto* const instance = new std::unordered_map<std::string, void*>;
  return *instance;
}

std::string loader_error() {
  const char* text = ::dlerror();
  return text == nullptr ? "unknown loader error" : text;
}

// Takes a place in the table, or says why not. A path that is there already has its place.
Status reserve(const std::string& path) {
  const std::size_t limit = SharedLibrary::max_loaded();
  const std::scoped_lock lock(process_mutex());
  auto& table = table_locked();
  if (table.contains(path)) return Status::ok();
  if (table.size() >= limit) {
    return {StatusCode::kFull,
            path + ": " + std::to_string(limit) + " libraries are loaded already"};
  }
  table.emplace(path, nullptr);
  return Status::ok();
}

}  // namespace

Result<SharedLibrary> SharedLibrary::open(const std::filesystem::path& path) {
  const std::string& name = path.native();
  if (Status status = reserve(name); !status) return status;
  // Outside the mutex: a library's constructors may take long, or open another one. The loader
  // knows a path that it has opened before and gives the same handle.
  void* const handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  std::string error = handle == nullptr ? loader_error() : std::string();
  const std::scoped_lock lock(process_mutex());
  auto& table = table_locked();
  const auto place = table.find(name);
  if (handle == nullptr) {
    if (place != table.end() && place->second == nullptr) table.erase(place);
    return Status(StatusCode::kIncompatible, "load " + name + ": " + error);
  }
  table[name] = handle;
  return SharedLibrary(handle);
}

void* SharedLibrary::symbol(const char* name) const noexcept { return ::dlsym(handle_, name); }

std::size_t SharedLibrary::loaded_count() noexcept {
  const std::scoped_lock lock(process_mutex());
  return table_locked().size();
}

std::size_t SharedLibrary::max_loaded() noexcept {
  static const std::size_t limit = [] {
    std::size_t maps = 0;
    std::ifstream("/proc/sys/vm/max_map_count") >> maps;
    if (maps == 0) maps = kDefaultMapCount;
    return std::min(kMaxLibraries, maps / kMapsPerLibrary / kShareOfMaps);
  }();
  return limit;
}

}  // namespace eagercache
