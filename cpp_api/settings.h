#pragma once

// The settings of a C++ program. The environment is read with getenv: not while a thread changes
// it.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "dispatcher/base/log.h"

namespace eagercache {

// What the environment's variables say, as config.py reads them; its table has their meanings. A
// malformed one is logged once and ignored.
struct CppSettings {
  std::filesystem::path directory;
  bool disable = false;
  std::vector<std::string> skip;
  std::optional<bool> always;   // EAGERCACHE_CHOOSE
  std::optional<bool> bitwise;  // EAGERCACHE_NUMERICS
  std::uint64_t max_bytes = std::uint64_t{10} << 30;
  std::vector<std::filesystem::path> tiers;
  bool allow_untrusted = false;
  std::filesystem::path revoked;
  LogLevel log = LogLevel::kWarning;
  double verify = 0;
};

CppSettings read_settings();

}  // namespace eagercache
