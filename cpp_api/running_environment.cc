#include "cpp_api/running_environment.h"

#include <ATen/Version.h>
#include <link.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "cpp_api/build_facts.h"
#include "dispatcher/base/source_digest.h"
#include "kernel_cache/base/digest.h"

namespace eagercache {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kShortDigest = 32;  // digits of a digest in an environment key

// The file that libtorch_cpu was mapped from.
fs::path libtorch_path() {
  std::string path;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t /*size*/, void* found) {
        const std::string_view name = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        if (!name.ends_with("/libtorch_cpu.so")) return 0;
        *static_cast<std::string*>(found) = name;
        return 1;
      },
      &path);
  return path;
}

// The installation records in the folder of packages that has torch/lib/libtorch_cpu.so.
std::vector<fs::path> records_beside(const fs::path& libtorch) {
  std::vector<fs::path> records;
  std::error_code error;
  const fs::path packages = libtorch.parent_path().parent_path().parent_path();
  for (const fs::directory_entry& entry : fs::directory_iterator(packages, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("torch-") && name.ends_with(".dist-info")) {
      records.push_back(entry.path() / "RECORD");
    }
  }
  return records;
}

// The digest of torch's installation record: that beside the package as it was loaded or, where the
// package is a link to another one, beside that. "none" where there is none, or more than one.
std::string torch_record() {
  const fs::path libtorch = libtorch_path();
  std::vector<fs::path> records = records_beside(libtorch);
  if (records.empty()) {
    std::error_code error;
    records = records_beside(fs::canonical(libtorch, error));
  }
  if (records.size() != 1) {
    return "none";
  }
  std::ifstream file(records.front(), std::ios::binary);
  return record_digest(std::string(std::istreambuf_iterator<char>(file), {}));
}

std::string libc_version() {
  const std::size_t size = ::confstr(_CS_GNU_LIBC_VERSION, nullptr, 0);
  if (size == 0) {
    return "unknown";
  }
  std::string text(size, '\0');
  ::confstr(_CS_GNU_LIBC_VERSION, text.data(), text.size());
  text.pop_back();  // the terminating zero
  return text;
}

std::string machine() {
  utsname names{};
  return ::uname(&names) == 0 ? names.machine : "";
}

// As environment.py writes values: one printable line.
std::string escaped(std::string_view value) {
  constexpr std::string_view kSpace = " \t\n\r\f\v";
  const std::size_t first = value.find_first_not_of(kSpace);
  if (first == std::string_view::npos) {
    return {};
  }
  value = value.substr(first, value.find_last_not_of(kSpace) - first + 1);
  constexpr char kHexDigits[] = "0123456789abcdef";
  std::string text;
  for (const char character : value) {
    const auto byte = static_cast<unsigned char>(character);
    if (character == '\\') {
      text += "\\\\";
    } else if (character == '\n' || character == '\r' || character == '\t') {
      text += character == '\n' ? "\\n" : character == '\r' ? "\\r" : "\\t";
    } else if (byte < 0x20 || byte >= 0x7f) {
      text += {'\\', 'x', kHexDigits[byte >> 4], kHexDigits[byte & 15]};
    } else {
      text += character;
    }
  }
  return text;
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "(unset)" : value;
}

std::vector<std::pair<const char*, std::string>> running_fields() {
  return {
      {"eagercache.version", build_facts::kVersion},
      {"eagercache.core", std::string(source_digest()).substr(0, kShortDigest)},
      {"torch.version", build_facts::kTorchVersion},
      {"torch.git", build_facts::kTorchGit},
      {"torch.debug", build_facts::kTorchDebug},
      {"torch.cuda", build_facts::kTorchCuda},
      {"torch.hip", build_facts::kTorchHip},
      {"torch.cxx11_abi", "True"},  // the build refuses another one
      {"torch.record", torch_record()},
      {"platform.system", "linux"},
      {"platform.machine", machine()},
      {"platform.libc", libc_version()},
      {"platform.page_size", std::to_string(::sysconf(_SC_PAGE_SIZE))},
      {"variable.ATEN_CPU_CAPABILITY", variable("ATEN_CPU_CAPABILITY")},
  };
}

// The text behind `name` in libtorch's description of its own build, up to a comma.
std::optional<std::string> of_build(const std::string& configuration, std::string_view name) {
  const std::size_t found = configuration.find(name);
  if (found == std::string::npos) {
    return std::nullopt;
  }
  const std::size_t begin = found + name.size();
  return configuration.substr(begin, configuration.find_first_of(",\n", begin) - begin);
}

}  // namespace

std::string record_digest(std::string_view record) {
  std::vector<std::string_view> lines;
  while (!record.empty()) {
    const std::size_t end = std::min(record.find('\n'), record.size());
    std::string_view line = record.substr(0, end);
    record.remove_prefix(std::min(end + 1, record.size()));
    if (line.ends_with('\r')) {
      line.remove_suffix(1);
    }
    // Byte code and console scripts are made on the spot: their lines differ between equal
    // installs.
    if (line.find(".pyc,") == std::string_view::npos && !line.starts_with("..")) {
      lines.push_back(line);
    }
  }
  if (lines.empty()) {
    return "none";
  }
  std::ranges::sort(lines);
  std::string text;
  for (const std::string_view line : lines) {
    text += (text.empty() ? "" : "\n");
    text += line;
  }
  return sha256(text).hex().substr(0, kShortDigest);
}

const std::string& running_environment_text() {
  static const auto* const kText = [] {  // leaked: threads may ask while the process ends
    auto* const text = new std::string();
    for (const auto& [name, value] : running_fields()) {
      *text += std::string(name) + ": " + escaped(value) + "\n";
    }
    return text;
  }();
  return *kText;
}

std::string foreign_torch() {
  const std::string configuration = at::show_config();
  const std::string built = std::string(build_facts::kTorchVersion);
  const std::string release = built.substr(0, built.find('+'));
  const auto version = of_build(configuration, "TORCH_VERSION=");
  const auto commit = of_build(configuration, "COMMIT_SHA=");
  if ((version && *version != release) || (commit && *commit != build_facts::kTorchGit)) {
    return "this process has torch " + version.value_or("?") + " (" + commit.value_or("?") +
           "), and eagercache was built against " + built + " (" + build_facts::kTorchGit +
           "); build it against the torch that the program uses";
  }
  return {};
}

std::string running_differences(const EnvironmentFields& theirs) {
  const EnvironmentFields ours = parse_environment(running_environment_text());
  return environment_differences(ours, ours, theirs, "it");
}

}  // namespace eagercache
