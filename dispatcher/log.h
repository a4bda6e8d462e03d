#pragma once

#include <string_view>

namespace eagercache {

enum class LogLevel : int { kOff = 0, kWarning = 1, kInfo = 2, kDebug = 3 };

// Threshold of this process; warnings by default.
void set_log_level(LogLevel level) noexcept;
bool log_enabled(LogLevel level) noexcept;

// One line on standard error, "eagercache: <level>: <message>", written with one system call so
// that lines of several processes do not mix. Never throws. Never on the path of a hit.
void log_line(LogLevel level, std::string_view message) noexcept;

// log_line at kWarning, once per process for each `key`.
void warn_once(std::string_view key, std::string_view message) noexcept;

}  // namespace eagercache
