#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernel_cache/artifact/weight_memory.h"
#include "kernel_cache/base/digest.h"
#include "kernel_cache/base/status.h"
#include "kernel_cache/files/file_layer.h"
#include "kernel_cache/format/signature.h"
#include "kernel_cache/format/signing_rules.h"

namespace eagercache {

// A module with its code and its weights in one signed file (FORMAT.md, section 9): the header, in
// which everything else is named with its digest; the shared objects; then the weights, raw, from a
// page's beginning, so that they can be mapped.

// Where a part of the file lies, and what it is.
struct ArtifactSection {
  std::uint64_t offset = 0;  // from the file's beginning
  std::uint64_t bytes = 0;
  Digest digest;
};

// One tensor of the module, and where its values lie in the file.
struct ArtifactConstant {
  enum class Kind : std::uint8_t {
    kParameter = 0,
    kBuffer = 1,
    kFolded = 2,  // computed from others, by the module's folding function
  };

  std::vector<std::string> names;  // one at least; more where the module has it under several
  Kind kind = Kind::kParameter;
  std::string dtype;  // "float32"
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint64_t> strides;  // in elements
  ArtifactSection data;
};

// What stands before code and weights, and is signed: it names both by their digests.
struct ArtifactHeader {
  PublicKey signer;
  Digest digest;  // SHA-256 of the header's text, which names everything else; not in it
  Validity validity;
  std::string environment;  // lines "field: value" of what a kernel meets when it runs
  std::vector<std::string> cpu_features;
  std::map<std::string, std::string> facts;
  std::vector<ArtifactSection> libraries;
  std::vector<ArtifactConstant> constants;
  std::uint64_t weights_offset = 0;  // a multiple of 4096
  std::uint64_t file_bytes = 0;
};

inline constexpr std::uint64_t kArtifactPage = 4096;
// Constants begin at multiples of it.
inline constexpr std::uint64_t kConstantAlignment = 64;
inline constexpr std::uint64_t kMaxArtifactHeader = std::uint64_t{64} << 20;

// An artifact whose header was checked. Holds the file open. Immutable; any thread.
class ModuleArtifact {
 public:
  // Reads and checks the header: one of the trusted keys has signed it, it is not revoked and has
  // not expired, every section lies inside of the file, and the file ends where it says. The
  // sections themselves are not read. kRefused for what the rules do not take or a wrong signature,
  // kCorrupt for what is no whole artifact, kIncompatible for another version.
  static Result<std::shared_ptr<const ModuleArtifact>> open(const std::filesystem::path& path,
                                                            const SigningRules& rules);

  const ArtifactHeader& header() const noexcept { return header_; }
  const std::filesystem::path& path() const noexcept { return path_; }

  // A path that the dynamic loader may open. The library's bytes were read and compared with the
  // digest, and checked as check_elf does.
  Result<std::filesystem::path> verified_library(std::size_t index) const;

  // The weights, mapped. kRefused when another user may write the file, unless `allow_untrusted`:
  // what is not read here cannot be compared. `verify` compares every constant's digest, which
  // reads all of them.
  Result<std::shared_ptr<const WeightMemory>> map_weights(bool verify, bool allow_untrusted) const;
  // The weights in memory of this process's own, each compared with its digest.
  Result<std::shared_ptr<const WeightMemory>> copy_weights() const;

  // Reads and compares everything: libraries, constants, and that there is nothing between them.
  Status verify() const;

  // A constant's bytes in what map_weights or copy_weights gave.
  std::span<const std::byte> bytes_of(const WeightMemory& memory, std::size_t constant) const;

 private:
  ModuleArtifact(std::filesystem::path path, ScopedFd file)
      : path_(std::move(path)), file_(std::move(file)) {}
  Status read_header(const SigningRules& rules);
  Status compare_constants(const WeightMemory& memory) const;
  Result<std::string> read_section(const ArtifactSection& section) const;

  std::filesystem::path path_;
  ScopedFd file_;
  ArtifactHeader header_;
};

// Whether the file begins like an artifact of any version.
bool is_module_artifact(const std::filesystem::path& path);

// What is written. The offsets, sizes and digests in `constants` are computed.
struct ArtifactContents {
  Validity validity;  // a creation time of 0 is the time of writing
  std::string environment;
  std::vector<std::string> cpu_features;
  std::map<std::string, std::string> facts;
  std::vector<std::filesystem::path> libraries;
  std::vector<ArtifactConstant> constants;
  std::vector<std::span<const std::byte>> data;  // one for each constant
};

// Writes a signed artifact under a temporary name, then renames it. Its size in bytes.
Result<std::uint64_t> write_module_artifact(const std::filesystem::path& path,
                                            ArtifactContents contents, const SigningKey& key);

// Between reader and writer.
std::string encode_artifact_header(const ArtifactHeader& header);
bool decode_artifact_header(std::string_view text, ArtifactHeader* header);
inline constexpr std::string_view kArtifactMark = "eagercache-module ";
inline constexpr std::string_view kArtifactFirstLine = "eagercache-module 2\n";
inline constexpr std::string_view kArtifactDomain = "eagercache-module-v2";
// What stands before the header: first line, key, signature, length.
inline constexpr std::size_t kArtifactHead =
    kArtifactFirstLine.size() + PublicKey::kBytes + Signature::kBytes + 8;

}  // namespace eagercache
