#include "cpp_api/settings.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <map>
#include <string_view>

namespace eagercache {
namespace {

std::string text_of(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string() : value;
}

std::string lowered(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](unsigned char letter) { return std::tolower(letter); });
  return text;
}

// The value behind the variable's text; `otherwise` when it is not set, or is none of `allowed`.
template <typename Value>
Value choice(const char* name, const std::map<std::string, Value>& allowed, Value otherwise) {
  const std::string text = text_of(name);
  if (text.empty()) {
    return otherwise;
  }
  if (const auto found = allowed.find(lowered(text)); found != allowed.end()) {
    return found->second;
  }
  std::string names;
  for (const auto& [each, value] : allowed) {
    names += (names.empty() ? "" : ", ") + each;
  }
  warn_once(name, std::string(name) + "='" + text + "' is ignored: use one of " + names);
  return otherwise;
}

bool flag(const char* name) {
  static const std::map<std::string, bool> kFlags = {
      {"0", false}, {"false", false}, {"no", false}, {"off", false},
      {"1", true},  {"true", true},   {"yes", true}, {"on", true}};
  return choice(name, kFlags, false);
}

std::vector<std::string> parts(const std::string& text, std::string_view separators) {
  std::vector<std::string> found;
  std::size_t begin = 0;
  while ((begin = text.find_first_not_of(separators, begin)) != std::string::npos) {
    const std::size_t end = std::min(text.find_first_of(separators, begin), text.size());
    found.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return found;
}

// The number at the front of `text`, and what follows it.
std::optional<std::pair<double, std::string>> number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || !(value >= 0)) {
    return std::nullopt;
  }
  return std::pair{value, std::string(end, text.data() + text.size())};
}

std::uint64_t size(const char* name, std::uint64_t otherwise) {
  static const std::map<std::string, int> kShifts = {
      {"", 0},     {"b", 0},  {"k", 10},  {"kb", 10},  {"kib", 10}, {"m", 20},  {"mb", 20},
      {"mib", 20}, {"g", 30}, {"gb", 30}, {"gib", 30}, {"t", 40},   {"tb", 40}, {"tib", 40}};
  const std::string text = text_of(name);
  if (text.empty()) {
    return otherwise;
  }
  const auto read = number(text);
  const auto shift = read ? kShifts.find(lowered(read->second)) : kShifts.end();
  if (shift == kShifts.end()) {
    warn_once(name, std::string(name) + "='" + text +
                        "' is ignored: use a number of bytes such as 500M or 10G");
    return otherwise;
  }
  return static_cast<std::uint64_t>(read->first *
                                    static_cast<double>(std::uint64_t{1} << shift->second));
}

double share(const char* name) {
  const std::string text = text_of(name);
  if (text.empty()) {
    return 0;
  }
  const auto read = number(text);
  if (!read || !read->second.empty() || read->first > 1) {
    warn_once(name, std::string(name) + "='" + text + "' is ignored: use a number from 0 to 1");
    return 0;
  }
  return read->first;
}

}  // namespace

CppSettings read_settings() {
  static const std::map<std::string, std::optional<bool>> kChoose = {{"faster", false},
                                                                     {"always", true}};
  static const std::map<std::string, std::optional<bool>> kNumerics = {{"accurate", false},
                                                                       {"bitwise", true}};
  static const std::map<std::string, LogLevel> kLevels = {{"off", LogLevel::kOff},
                                                          {"warning", LogLevel::kWarning},
                                                          {"info", LogLevel::kInfo},
                                                          {"debug", LogLevel::kDebug}};
  CppSettings settings;
  settings.directory = text_of("EAGERCACHE_DIR");
  settings.disable = flag("EAGERCACHE_DISABLE");
  settings.skip = parts(text_of("EAGERCACHE_SKIP"), ", \t\n");
  settings.always = choice("EAGERCACHE_CHOOSE", kChoose, std::optional<bool>());
  settings.bitwise = choice("EAGERCACHE_NUMERICS", kNumerics, std::optional<bool>());
  settings.max_bytes = size("EAGERCACHE_MAX_BYTES", settings.max_bytes);
  for (const std::string& tier : parts(text_of("EAGERCACHE_TIERS"), ":")) {
    settings.tiers.push_back(std::filesystem::absolute(tier));
  }
  settings.allow_untrusted = flag("EAGERCACHE_ALLOW_UNTRUSTED");
  settings.revoked = text_of("EAGERCACHE_REVOKED");
  settings.log = choice("EAGERCACHE_LOG", kLevels, LogLevel::kWarning);
  settings.verify = share("EAGERCACHE_VERIFY");
  return settings;
}

}  // namespace eagercache
