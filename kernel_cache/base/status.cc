#include "kernel_cache/base/status.h"

#include <cerrno>
#include <system_error>

namespace eagercache {
namespace {

StatusCode code_of_errno(int error_number) noexcept {
  switch (error_number) {
    case ENOENT:
      return StatusCode::kNotFound;
    case ENOSPC:
    case EDQUOT:
      return StatusCode::kFull;
    case EACCES:
    case EPERM:
    case EROFS:
      return StatusCode::kDenied;
    default:
      return StatusCode::kIoError;
  }
}

}  // namespace

std::string_view status_code_name(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kNotFound:
      return "not_found";
    case StatusCode::kCorrupt:
      return "corrupt";
    case StatusCode::kIncompatible:
      return "incompatible";
    case StatusCode::kIoError:
      return "io_error";
    case StatusCode::kDenied:
      return "denied";
    case StatusCode::kBusy:
      return "busy";
    case StatusCode::kRefused:
      return "refused";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kInvalidArgument:
      return "invalid_argument";
    case StatusCode::kFull:
      return "full";
  }
  return "unknown";
}

Status Status::from_errno(int error_number, std::string_view action, std::string_view path) {
  // generic_category's text comes from a table, not from strerror's shared buffer.
  std::string message(action);
  message.append(" ").append(path).append(": ");
  message.append(std::generic_category().message(error_number));
  return {code_of_errno(error_number), std::move(message)};
}

std::string Status::to_string() const {
  if (is_ok()) return "ok";
  std::string text(status_code_name(code_));
  text.append(": ").append(message_);
  return text;
}

}  // namespace eagercache
