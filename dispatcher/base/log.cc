#include "dispatcher/base/log.h"

#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>
#include <string>

namespace eagercache {
namespace {

std::atomic<int> threshold{static_cast<int>(LogLevel::kWarning)};

constexpr std::string_view level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kOff:
      return "off";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kDebug:
      return "debug";
  }
  return "";
}

void append_value(std::string& line, std::string_view value) {
  if (value.find_first_of(" \t\r\n\"=") == std::string_view::npos) {
    line.append(value);
    return;
  }
  line.push_back('"');
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      line.push_back('\\');
    }
    line.push_back(static_cast<unsigned char>(c) < ' ' ? ' ' : c);
  }
  line.push_back('"');
}

}  // namespace

void set_log_level(LogLevel level) noexcept {
  threshold.store(static_cast<int>(level), std::memory_order_relaxed);
}

bool log_enabled(LogLevel level) noexcept {
  return static_cast<int>(level) <= threshold.load(std::memory_order_relaxed);
}

void log_line(LogLevel level, std::string_view message) noexcept {
  if (!log_enabled(level)) {
    return;
  }
  try {
    std::string line = "eagercache: ";
    line.append(level_name(level)).append(": ").append(message).append("\n");
    [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
  } catch (...) {
    // A line of log is worth less than the caller.
  }
}

void log_event(LogLevel level, std::string_view event,
               std::initializer_list<LogField> fields) noexcept {
  if (!log_enabled(level)) {
    return;
  }
  try {
    std::string message = "event=";
    message.append(event);
    for (const LogField& field : fields) {
      if (!field.value.empty()) {
        message.append(" ").append(field.name).append("=");
        append_value(message, field.value);
      }
    }
    log_line(level, message);
  } catch (...) {
    // As above.
  }
}

void warn_once(std::string_view key, std::string_view message) noexcept {
  try {
    static auto* mutex = new std::mutex();
    static auto* seen = new std::set<std::string, std::less<>>();
    {
      std::lock_guard lock(*mutex);
      if (!seen->emplace(key).second) {
        return;
      }
    }
    log_line(LogLevel::kWarning, message);
  } catch (...) {
    log_line(LogLevel::kWarning, message);
  }
}

}  // namespace eagercache
