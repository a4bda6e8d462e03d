#pragma once

// For files outside of a store, whose folder others may share (bundles, artifacts). An object owns
// the temporary file until it is published; it is one thread's at a time.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "kernel_cache/base/status.h"

namespace eagercache {

// A file that is complete under its name, or not there: written under a temporary name beside it,
// flushed, renamed.
class WholeFile {
 public:
  // kDenied, kNotFound and the like when there can be no such file, kInvalidArgument where a
  // device, a pipe or a folder has the name. Mode 0644, less the umask.
  static Result<WholeFile> create(const std::filesystem::path& path);
  WholeFile(WholeFile&& other) noexcept;
  WholeFile& operator=(WholeFile&&) = delete;
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;
  // What was not published is removed.
  ~WholeFile();

  Status write(std::string_view bytes);
  // Replaces the file that has the name. Nothing may be written afterwards.
  Status publish();
  std::uint64_t written() const noexcept { return written_; }

 private:
  WholeFile(std::filesystem::path path, std::string temporary, int fd)
      : path_(std::move(path)), temporary_(std::move(temporary)), fd_(fd) {}

  std::filesystem::path path_;
  std::string temporary_;
  int fd_ = -1;
  std::uint64_t written_ = 0;
};

}  // namespace eagercache
