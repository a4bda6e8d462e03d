#include "kernel_cache/artifact/module_artifact.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>
#include <utility>

#include "kernel_cache/base/byte_fields.h"
#include "kernel_cache/base/guarded.h"
#include "kernel_cache/files/sealed_copy.h"
#include "kernel_cache/files/trust.h"
#include "kernel_cache/loading/elf_check.h"

namespace eagercache {
namespace {

Status damaged(const std::filesystem::path& path, const std::string& what) {
  return Status(StatusCode::kCorrupt, path.string() + " is no whole artifact: " + what);
}

// Exactly `size` bytes from `offset`.
Result<std::string> read_exactly(int fd, std::uint64_t offset, std::uint64_t size,
                                 const std::filesystem::path& path) {
  std::string bytes(static_cast<std::size_t>(size), '\0');
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t moved =
        ::pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return Status::from_errno(errno, "read", path.string());
    if (moved == 0) return damaged(path, "it ends early");
    done += static_cast<std::size_t>(moved);
  }
  return bytes;
}

// Whether the sections follow each other, aligned, inside of the file.
bool is_laid_out(const ArtifactHeader& header, std::uint64_t header_end) {
  std::uint64_t end = header_end;
  const auto follows = [&](const ArtifactSection& section) {
    if (section.offset < end || section.offset % kConstantAlignment != 0 ||
        section.offset > header.file_bytes || section.bytes > header.file_bytes - section.offset) {
      return false;
    }
    end = section.offset + section.bytes;
    return true;
  };
  if (!std::ranges::all_of(header.libraries, follows) || header.weights_offset < end ||
      header.weights_offset % kArtifactPage != 0 || header.weights_offset > header.file_bytes) {
    return false;
  }
  end = header.weights_offset;
  for (const ArtifactConstant& constant : header.constants) {
    if (constant.names.empty() || constant.sizes.size() != constant.strides.size() ||
        !follows(constant.data)) {
      return false;
    }
  }
  return end == header.file_bytes || (header.constants.empty() && end <= header.file_bytes);
}

// A pipe in the place of a file is not waited for.
int open_to_read(const std::filesystem::path& path) {
  return FileLayer::posix().open(AT_FDCWD, path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
}

}  // namespace

bool is_module_artifact(const std::filesystem::path& path) {
  const ScopedFd file(FileLayer::posix(), open_to_read(path));
  std::array<char, kArtifactMark.size()> begin{};
  return file.valid() &&
         ::pread(file.get(), begin.data(), begin.size(), 0) == static_cast<ssize_t>(begin.size()) &&
         std::string_view(begin.data(), begin.size()) == kArtifactMark;
}

Result<std::shared_ptr<const ModuleArtifact>> ModuleArtifact::open(
    const std::filesystem::path& path, const SigningRules& rules) {
  return guarded([&]() -> Result<std::shared_ptr<const ModuleArtifact>> {
    ScopedFd file(FileLayer::posix(), open_to_read(path));
    if (!file.valid()) {
      return Status::from_errno(-file.get(), "open", path.string());
    }
    std::shared_ptr<ModuleArtifact> artifact(new ModuleArtifact(path, std::move(file)));
    if (Status status = artifact->read_header(rules); !status) {
      return status;
    }
    return std::shared_ptr<const ModuleArtifact>(std::move(artifact));
  });
}

Status ModuleArtifact::read_header(const SigningRules& rules) {
  struct stat info {};
  if (::fstat(file_.get(), &info) != 0) {
    return Status::from_errno(errno, "ask about", path_.string());
  }
  if (!S_ISREG(info.st_mode)) {
    return damaged(path_, "it is no regular file");
  }
  const auto size = static_cast<std::uint64_t>(info.st_size);
  Result<std::string> head =
      read_exactly(file_.get(), 0, std::min<std::uint64_t>(size, kArtifactHead), path_);
  if (!head) {
    return head.status();
  }
  if (!head->starts_with(kArtifactFirstLine)) {
    return head->starts_with(kArtifactMark)
               ? Status(StatusCode::kIncompatible,
                        path_.string() +
                            " is an artifact of another version than this eagercache reads")
               : damaged(path_, "it does not begin like one");
  }
  FieldReader reader(std::string_view(head.value()).substr(kArtifactFirstLine.size()));
  Signature signature;
  std::uint64_t length = 0;
  if (!reader.bytes(&header_.signer.bytes) || !reader.bytes(&signature.bytes) ||
      !reader.number(&length)) {
    return damaged(path_, "it ends in its signature");
  }
  if (Status status = check_signer(path_, header_.signer, rules); !status) {
    return status;
  }
  if (length > kMaxArtifactHeader || length > size - kArtifactHead) {
    return damaged(path_, "it ends in its header");
  }
  const Result<std::string> text = read_exactly(file_.get(), kArtifactHead, length, path_);
  if (!text) {
    return text.status();
  }
  if (!is_signed_by(header_.signer, signature, digest_message(kArtifactDomain, text.value()))) {
    return {StatusCode::kRefused,
            path_.string() + " was altered or cut off: its signature is of other bytes"};
  }
  if (!decode_artifact_header(text.value(), &header_) ||
      !is_laid_out(header_, kArtifactHead + length)) {
    return damaged(path_, "its header is malformed");
  }
  if (size != header_.file_bytes) {
    return damaged(path_, "it has " + std::to_string(size) + " bytes, not " +
                              std::to_string(header_.file_bytes));
  }
  header_.digest = sha256(text.value());
  return check_validity(path_, header_.digest, header_.validity, rules);
}

Result<std::string> ModuleArtifact::read_section(const ArtifactSection& section) const {
  Result<std::string> bytes = read_exactly(file_.get(), section.offset, section.bytes, path_);
  if (bytes && sha256(bytes.value()) != section.digest) {
    return damaged(path_, "its code was altered");
  }
  return bytes;
}

Result<std::filesystem::path> ModuleArtifact::verified_library(std::size_t index) const {
  return guarded([&]() -> Result<std::filesystem::path> {
    const ArtifactSection& section = header_.libraries.at(index);
    const Result<std::string> bytes = read_section(section);
    if (!bytes) {
      return bytes.status();
    }
    if (Status status = check_elf(std::as_bytes(std::span<const char>(bytes.value()))); !status) {
      return status;
    }
    return sealed_copy(section.digest, bytes.value());
  });
}

Status ModuleArtifact::compare_constants(const WeightMemory& memory) const {
  for (std::size_t i = 0; i < header_.constants.size(); ++i) {
    if (sha256(bytes_of(memory, i)) != header_.constants[i].data.digest) {
      return damaged(path_, "the constant " + header_.constants[i].names.front() + " was altered");
    }
  }
  return Status::ok();
}

Result<std::shared_ptr<const WeightMemory>> ModuleArtifact::map_weights(
    bool verify, bool allow_untrusted) const {
  return guarded([&]() -> Result<std::shared_ptr<const WeightMemory>> {
    struct stat info {};
    if (::fstat(file_.get(), &info) != 0) {
      return Status::from_errno(errno, "ask about", path_.string());
    }
    if (Status status =
            check_trust(info, FileRole::kFile, path_.string(), TrustPolicy{allow_untrusted});
        !status) {
      return status;
    }
    auto memory = WeightMemory::map(file_.get(), header_.weights_offset,
                                    header_.file_bytes - header_.weights_offset, path_.string());
    if (memory && verify) {
      if (Status status = compare_constants(*memory.value()); !status) return status;
    }
    return memory;
  });
}

Result<std::shared_ptr<const WeightMemory>> ModuleArtifact::copy_weights() const {
  return guarded([&]() -> Result<std::shared_ptr<const WeightMemory>> {
    auto memory = WeightMemory::copy(file_.get(), header_.weights_offset,
                                     header_.file_bytes - header_.weights_offset, path_.string());
    if (memory) {
      if (Status status = compare_constants(*memory.value()); !status) return status;
    }
    return memory;
  });
}

Status ModuleArtifact::verify() const {
  return guarded([&]() -> Status {
    const auto memory = WeightMemory::map(file_.get(), 0, header_.file_bytes, path_.string());
    if (!memory) {
      return memory.status();
    }
    const std::span<const std::byte> all = memory.value()->bytes();
    std::uint64_t end = kArtifactHead + encode_artifact_header(header_).size();
    const auto check = [&](const ArtifactSection& section, const std::string& what) {
      const auto between = all.subspan(end, section.offset - end);
      if (std::ranges::any_of(between, [](std::byte byte) { return byte != std::byte{0}; })) {
        return damaged(path_, "something stands before " + what);
      }
      end = section.offset + section.bytes;
      return sha256(all.subspan(section.offset, section.bytes)) == section.digest
                 ? Status::ok()
                 : damaged(path_, what + " was altered");
    };
    Status status;
    for (std::size_t i = 0; status && i < header_.libraries.size(); ++i) {
      status = check(header_.libraries[i], "its code");
    }
    for (std::size_t i = 0; status && i < header_.constants.size(); ++i) {
      status =
          check(header_.constants[i].data, "the constant " + header_.constants[i].names.front());
    }
    return status;
  });
}

std::span<const std::byte> ModuleArtifact::bytes_of(const WeightMemory& memory,
                                                    std::size_t constant) const {
  const ArtifactSection& section = header_.constants.at(constant).data;
  return memory.bytes().subspan(section.offset - header_.weights_offset, section.bytes);
}

}  // namespace eagercache
