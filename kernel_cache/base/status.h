#pragma once

#include <cassert>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace eagercache {

// What went wrong with the outside world: files, a foreign shared object, another process.
// Errors of this kind are values; no exception crosses the border of kernel_cache/.
enum class StatusCode {
  kOk,
  kNotFound,         // no such entry: the ordinary miss
  kCorrupt,          // bytes differ from what was published; the caller quarantines
  kIncompatible,     // intact, but for another machine, torch, format or build
  kIoError,          // a call to the operating system failed; the message says which and why
  kDenied,           // it is not permitted to us: EACCES, EPERM, or EROFS
  kBusy,             // another thread or process holds the lock; try later, never wait
  kRefused,          // owner, mode or file type breaks the trust rules; nothing was opened below it
  kUnsupported,      // a feature that this build or store does not have
  kInvalidArgument,  // the caller's mistake
  kFull,             // a limit of ours (loaded kernels, entry size) or the disk's is reached
};

// The code's stable lower-case name ("not_found"), for logs and JSON.
std::string_view status_code_name(StatusCode code) noexcept;

// A code and, unless ok, a message that names the path or key concerned. Cheap to move.
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status ok() noexcept { return {}; }
  // Builds kIoError (kNotFound for ENOENT, kFull for ENOSPC and EDQUOT, kDenied as above) from an
  // errno value. The caller passes errno itself, read before any other call could change it.
  static Status from_errno(int error_number, std::string_view action, std::string_view path);

  bool is_ok() const noexcept { return code_ == StatusCode::kOk; }
  explicit operator bool() const noexcept { return is_ok(); }
  StatusCode code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }
  // "corrupt: <message>", or "ok".
  std::string to_string() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A T, or the Status that says why there is none. value() requires is_ok().
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    assert(!status_.is_ok());
  }

  bool is_ok() const noexcept { return value_.has_value(); }
  explicit operator bool() const noexcept { return is_ok(); }
  const Status& status() const noexcept { return status_; }
  StatusCode code() const noexcept { return status_.code(); }

  T& value() & {
    assert(is_ok());
    return *value_;
  }
  const T& value() const& {
    assert(is_ok());
    return *value_;
  }
  T&& value() && {
    assert(is_ok());
    return std::move(*value_);
  }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace eagercache
