#pragma once

// What this process says on standard error, as far as EAGERCACHE_LOG asks for it: lines for people,
// and events whose fields programs can read. Nothing is owned. Any thread.

#include <initializer_list>
#include <string_view>

namespace eagercache {

enum class LogLevel : int { kOff = 0, kWarning = 1, kInfo = 2, kDebug = 3 };

// Threshold of this process; warnings by default.
void set_log_level(LogLevel level) noexcept;
bool log_enabled(LogLevel level) noexcept;

// One line on standard error, "eagercache: <level>: <message>", written with one system call so
// that lines of several processes do not mix. Never throws. Never on the path of a hit.
void log_line(LogLevel level, std::string_view message) noexcept;

// A name and a value of an event. Views: whoever logs keeps them until the line is written.
struct LogField {
  std::string_view name;
  std::string_view value;
};

// log_line for something that happened: "event=<event> <name>=<value> ...", in one line. Values
// with spaces, quotes or "=" in them are quoted, and line ends in them become spaces. Fields with
// an empty value are left out. Costs one comparison when the level is off; callers that build
// values ask log_enabled() first.
void log_event(LogLevel level, std::string_view event,
               std::initializer_list<LogField> fields) noexcept;

// log_line at kWarning, once per process for each `key`.
void warn_once(std::string_view key, std::string_view message) noexcept;

}  // namespace eagercache
