#include "kernel_cache/base/environment_fields.h"

#include <algorithm>
#include <cstddef>

namespace eagercache {
namespace {

std::string value_of(const EnvironmentFields& fields, const std::string& name) {
  const auto found = fields.find(name);
  return found == fields.end() ? "(missing)" : found->second;
}

}  // namespace

EnvironmentFields parse_environment(std::string_view text) {
  EnvironmentFields fields;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (const std::size_t colon = line.find(": "); colon != std::string_view::npos) {
      fields.insert_or_assign(std::string(line.substr(0, colon)),
                              std::string(line.substr(colon + 2)));
    }
  }
  return fields;
}

std::string environment_differences(const EnvironmentFields& checked, const EnvironmentFields& ours,
                                    const EnvironmentFields& theirs, std::string_view what) {
  std::string differences;
  for (const auto& [name, value] : checked) {
    const std::string here = value_of(ours, name);
    const std::string there = value_of(theirs, name);
    if (there != here) {
      differences.append(differences.empty() ? "" : "; ").append(name).append(" is ").append(here);
      differences.append(" and ").append(what).append(" was made with ").append(there);
    }
  }
  return differences;
}

}  // namespace eagercache
