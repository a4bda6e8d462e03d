#include "cpp_api/store_choice.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include "cpp_api/running_environment.h"
#include "cpp_api/settings.h"
#include "kernel_cache/base/cpu_features.h"

namespace eagercache {
namespace {

namespace fs = std::filesystem;

constexpr std::uintmax_t kMaxEnvironmentBytes = 64 * 1024;

std::string read_environment(const fs::path& path) {
  std::error_code error;
  const std::uintmax_t size = fs::file_size(path, error);
  if (error || size > kMaxEnvironmentBytes) {
    return {};
  }
  std::string text(size, '\0');
  std::ifstream file(path, std::ios::binary);
  return file.read(text.data(), static_cast<std::streamsize>(size)) ? text : std::string();
}

std::uint64_t count_entries(const fs::path& environment) {
  std::uint64_t count = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator entry(environment / "m", error), end; entry != end;
       entry.increment(error)) {
    if (error) break;
    count += entry.depth() == 1 ? 1 : 0;
  }
  return count;
}

// Why kernels of that environment cannot run here; empty when they can.
std::string problem_of(const EnvironmentFields& fields) {
  std::string problem = running_differences(fields);
  const auto features = fields.find("cpu.features");
  if (features != fields.end()) {
    std::istringstream words(features->second);
    const std::vector<std::string> required(std::istream_iterator<std::string>(words), {});
    if (const std::string missing = missing_cpu_feature(required, host_cpu_features());
        !missing.empty()) {
      problem += (problem.empty() ? "" : "; ") + std::string("this machine has no ") + missing;
    }
  }
  return problem;
}

}  // namespace

Result<StoredEnvironment> choose_environment(const fs::path& root, const std::string& id) {
  std::optional<StoredEnvironment> best;
  std::string nearest;  // the shortest of the problems
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(root / "v1", error)) {
    StoredEnvironment found{entry.path().filename().string(),
                            read_environment(entry.path() / "ENV"), 0};
    if (found.text.empty() || (!id.empty() && found.id != id)) {
      continue;
    }
    if (const std::string problem = problem_of(parse_environment(found.text)); !problem.empty()) {
      if (nearest.empty() || problem.size() < nearest.size()) {
        nearest = problem;
      }
      continue;
    }
    found.entries = count_entries(entry.path());
    if (!best || found.entries > best->entries ||
        (found.entries == best->entries && found.id < best->id)) {
      best = std::move(found);
    }
  }
  if (best) {
    return *std::move(best);
  }
  if (!nearest.empty()) {
    return Status(StatusCode::kIncompatible,
                  "the kernels of " + root.string() + " cannot be used here: " + nearest);
  }
  return Status(StatusCode::kNotFound,
                id.empty() ? "there is no store with kernels at " + root.string()
                           : "the store at " + root.string() + " has no environment " + id);
}

Result<Revocations> read_revoked(const fs::path& named) {
  const fs::path path = named.empty() ? read_settings().revoked : named;
  return path.empty() ? Revocations() : Revocations::read(path);
}

Result<SigningRules> read_signing_rules(const fs::path& path,
                                        const std::vector<fs::path>& trusted_keys,
                                        const fs::path& revoked) {
  if (trusted_keys.empty()) {
    return Status(StatusCode::kInvalidArgument, "no key is trusted; name the public key that " +
                                                    path.string() + " was signed with");
  }
  Result<Revocations> list = read_revoked(revoked);
  if (!list) {
    return list.status();
  }
  SigningRules rules;
  rules.revoked = std::move(list).value();
  for (const fs::path& key : trusted_keys) {
    Result<PublicKey> read = read_public_key(key);
    if (!read) {
      return read.status();
    }
    rules.trusted.push_back(read.value());
  }
  return rules;
}

Result<Bundle> read_usable_bundle(const fs::path& path, const std::vector<fs::path>& trusted_keys,
                                  const fs::path& revoked) {
  const Result<SigningRules> rules = read_signing_rules(path, trusted_keys, revoked);
  if (!rules) {
    return rules.status();
  }
  Result<Bundle> bundle = read_bundle(path, rules.value());
  if (!bundle) {
    return bundle;
  }
  if (const std::string differences = running_differences(parse_environment(bundle->environment));
      !differences.empty()) {
    return Status(StatusCode::kIncompatible,
                  path.string() + " cannot be used here: " + differences);
  }
  return bundle;
}

Result<StoreContents> list_contents(DiskStore& store, const std::string& policy_tag) {
  StoreContents contents;
  const Status status = store.for_each(false, [&](const EntryInfo& entry) {
    const Manifest& manifest = entry.manifest;
    if (manifest.kind == EntryKind::kFailed || manifest.fact("choose") != policy_tag ||
        !store.withdrawal(manifest).empty()) {
      return;
    }
    if (manifest.kind == EntryKind::kNative) {
      ++contents.decisions;
      return;
    }
    contents.operators.emplace(manifest.fact("op"), manifest.fact("dispatch_key"));
    contents.kernels.push_back(manifest);
  });
  if (!status) {
    return status;
  }
  return contents;
}

}  // namespace eagercache
