#include "tests/support/fault_file_layer.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

namespace eagercache {

void FaultFileLayer::start_plan() {
  fail_at_ = 0;
  stop_at_ = 0;
  only_call_ = -1;
  calls_ = 0;
  calls_of_ = 0;
  fault_happened_ = false;
  act_at_ = 0;
}

void FaultFileLayer::fail_call(std::uint64_t n, int error) {
  start_plan();
  error_ = error;
  fail_at_ = n;
}

void FaultFileLayer::fail_call_of(FileCall call, std::uint64_t n, int error) {
  start_plan();
  error_ = error;
  only_call_ = static_cast<int>(call);
  fail_at_ = n;
}

void FaultFileLayer::stop_before_call(std::uint64_t n) {
  start_plan();
  stop_at_ = n;
}

void FaultFileLayer::before_call(std::uint64_t n, std::function<void()> action) {
  start_plan();
  action_ = std::move(action);
  act_at_ = n;
}

void FaultFileLayer::clear_faults() { start_plan(); }

std::vector<std::string> FaultFileLayer::opened_names() const {
  const std::scoped_lock lock(mutex_);
  return opened_;
}

int FaultFileLayer::next(FileCall call, bool changes) {
  if (changes) ++changes_;
  const std::uint64_t number = ++calls_;
  if (act_at_ != 0 && number == act_at_) {
    act_at_ = 0;
    fault_happened_ = true;
    const std::function<void()> action = std::move(action_);  // it may plan the next one
    action();
  }
  if (stop_at_ != 0 && number >= stop_at_) {
    fault_happened_ = true;
    return -EIO;
  }
  const int only = only_call_;
  if (only >= 0 && only != static_cast<int>(call)) return 0;
  const std::uint64_t position = only >= 0 ? ++calls_of_ : number;
  if (fail_at_ == 0 || position != fail_at_) return 0;
  fault_happened_ = true;
  return -error_;
}

int FaultFileLayer::open(int directory, const char* name, int flags, mode_t mode) {
  if (recording_) {
    const std::scoped_lock lock(mutex_);
    opened_.emplace_back(name);
  }
  const bool changes = (flags & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC)) != 0;
  const int error = next(FileCall::kOpen, changes);
  return error < 0 ? error : real_.open(directory, name, flags, mode);
}

int FaultFileLayer::close(int fd) {
  const int error = next(FileCall::kClose, false);
  const int result = real_.close(fd);
  return error < 0 ? error : result;
}

ssize_t FaultFileLayer::read(int fd, void* buffer, std::size_t size) {
  const int error = next(FileCall::kRead, false);
  return error < 0 ? error : real_.read(fd, buffer, size);
}

ssize_t FaultFileLayer::write(int fd, const void* data, std::size_t size) {
  const int error = next(FileCall::kWrite, true);
  return error < 0 ? error : real_.write(fd, data, size);
}

int FaultFileLayer::sync(int fd) {
  const int error = next(FileCall::kSync, true);
  if (error < 0) return error;
  return sync_enabled_ ? real_.sync(fd) : 0;
}

int FaultFileLayer::status(int directory, const char* name, struct stat* out) {
  const int error = next(FileCall::kStatus, false);
  return error < 0 ? error : real_.status(directory, name, out);
}

int FaultFileLayer::may_write(int directory) {
  const int error = next(FileCall::kMayWrite, false);
  return error < 0 ? error : real_.may_write(directory);
}

int FaultFileLayer::may_execute(int fd) {
  const int error = next(FileCall::kMayExecute, false);
  return error < 0 ? error : real_.may_execute(fd);
}

int FaultFileLayer::set_mode(int directory, const char* name, mode_t mode) {
  const int error = next(FileCall::kSetMode, true);
  return error < 0 ? error : real_.set_mode(directory, name, mode);
}

int FaultFileLayer::set_time(int directory, const char* name, std::int64_t seconds) {
  const int error = next(FileCall::kSetTime, true);
  return error < 0 ? error : real_.set_time(directory, name, seconds);
}

int FaultFileLayer::link(int from_directory, const char* from, int to_directory, const char* to) {
  const int error = next(FileCall::kLink, true);
  return error < 0 ? error : real_.link(from_directory, from, to_directory, to);
}

int FaultFileLayer::rename(int from_directory, const char* from, int to_directory, const char* to,
                           bool replace) {
  const int error = next(FileCall::kRename, true);
  return error < 0 ? error : real_.rename(from_directory, from, to_directory, to, replace);
}

int FaultFileLayer::unlink(int directory, const char* name, bool is_directory) {
  const int error = next(FileCall::kUnlink, true);
  return error < 0 ? error : real_.unlink(directory, name, is_directory);
}

int FaultFileLayer::make_directory(int directory, const char* name, mode_t mode) {
  const int error = next(FileCall::kMakeDirectory, true);
  return error < 0 ? error : real_.make_directory(directory, name, mode);
}

int FaultFileLayer::list(int fd, std::vector<std::string>* names) {
  const int error = next(FileCall::kList, false);
  return error < 0 ? error : real_.list(fd, names);
}

int FaultFileLayer::read_link(int fd, std::string* target) {
  const int error = next(FileCall::kReadLink, false);
  return error < 0 ? error : real_.read_link(fd, target);
}

int FaultFileLayer::lock(int fd, bool take) {
  const int error = next(FileCall::kLock, true);
  // A dead process holds nothing, so giving up a lock is never prevented.
  if (!take) return real_.lock(fd, take);
  return error < 0 ? error : real_.lock(fd, take);
}

std::int64_t FaultFileLayer::now() { return real_.now() + clock_offset_; }

}  // namespace eagercache
