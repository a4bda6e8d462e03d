// The fields of an environment key's text: one line "field: value" each (environment.py).
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace eagercache {

using EnvironmentFields = std::map<std::string, std::string, std::less<>>;

// Lines without a colon and a blank are left out; the last of two lines with one field counts.
EnvironmentFields parse_environment(std::string_view text);

// The fields named in `checked` (which is `ours` or `theirs`) whose values differ, as
// "field is X and WHAT was made with Y" of ours and theirs, joined by "; "; empty without any.
std::string environment_differences(const EnvironmentFields& checked, const EnvironmentFields& ours,
                                    const EnvironmentFields& theirs, std::string_view what);

}  // namespace eagercache
