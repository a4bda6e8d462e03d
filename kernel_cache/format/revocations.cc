#include "kernel_cache/format/revocations.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <system_error>

#include "kernel_cache/base/digest.h"

namespace eagercache {
namespace {

constexpr std::string_view kBlanks = " \t\r";
constexpr std::size_t kDigits = 64;

Status unusable(StatusCode code, std::string_view name, const std::string& what) {
  return {code, "the list of what is revoked, " + std::string(name) + ", " + what +
                    "; mend it, or name another one"};
}

std::string lowered(std::string_view text) {
  std::string result(text);
  std::ranges::transform(result, result.begin(), [](char letter) {
    return letter >= 'A' && letter <= 'F' ? static_cast<char>(letter - 'A' + 'a') : letter;
  });
  return result;
}

}  // namespace

Result<Revocations> Revocations::read(const std::filesystem::path& path) {
  std::error_code error;
  // A pipe in its place is not waited for.
  if (!std::filesystem::is_regular_file(path, error)) {
    return unusable(StatusCode::kRefused, path.native(),
                    error ? "cannot be read (" + error.message() + ")" : "is no regular file");
  }
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error || size > kMaxRevocationBytes) {
    return unusable(StatusCode::kRefused, path.native(), "is larger than one may be");
  }
  std::string text(static_cast<std::size_t>(size), '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(text.size()))) {
    return unusable(StatusCode::kRefused, path.native(), "cannot be read");
  }
  return parse(text, path.native());
}

Result<Revocations> Revocations::parse(std::string_view text, std::string_view name) {
  Revocations revocations;
  for (std::size_t number = 1; !text.empty(); ++number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    line.remove_prefix(std::min(line.find_first_not_of(kBlanks), line.size()));
    if (line.empty() || line.front() == '#') continue;
    const std::string_view word = line.substr(0, line.find_first_of(kBlanks));
    const std::optional<Digest> id =
        word.size() == kDigits ? Digest::from_hex(lowered(word)) : std::nullopt;
    if (!id) {
      return unusable(StatusCode::kInvalidArgument, name,
                      "has a line " + std::to_string(number) +
                          " that does not begin with 64 hexadecimal digits");
    }
    revocations.ids_.insert(id->bytes);
  }
  return revocations;
}

}  // namespace eagercache
