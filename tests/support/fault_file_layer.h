#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "kernel_cache/files/file_layer.h"

namespace eagercache {

enum class FileCall {
  kOpen,
  kClose,
  kRead,
  kWrite,
  kSync,
  kStatus,
  kMayWrite,
  kMayExecute,
  kSetMode,
  kSetTime,
  kLink,
  kRename,
  kUnlink,
  kMakeDirectory,
  kList,
  kReadLink,
  kLock,
};

// The real file system with faults, a movable clock and a record of what was asked. Thread-safe,
// except that plans are made before the calls that they concern.
class FaultFileLayer : public FileLayer {
 public:
  FaultFileLayer() = default;

  // The n-th call from now (1 is the next) fails with `error` instead of being made; a failing
  // close closes all the same, as Linux does.
  void fail_call(std::uint64_t n, int error);
  // The n-th call from now of one sort fails.
  void fail_call_of(FileCall call, std::uint64_t n, int error);
  // That call and all later ones fail, as for a process that is no more. Descriptors are closed.
  void stop_before_call(std::uint64_t n);
  // Runs `action` right before the n-th call from now: what another process may do at that moment.
  // Calls of the action count, too. For single-threaded tests.
  void before_call(std::uint64_t n, std::function<void()> action);
  void clear_faults();
  // Makes sync() do nothing and succeed.
  void set_sync_enabled(bool enabled) { sync_enabled_ = enabled; }
  // Moves the clock; 0 is the real time.
  void set_clock_offset(std::int64_t seconds) { clock_offset_ = seconds; }

  // Calls since the last plan (or construction).
  std::uint64_t calls() const { return calls_; }
  // Whether what was planned came to pass.
  bool fault_happened() const { return fault_happened_; }
  // Calls since construction that change something below a directory, or could.
  std::uint64_t changes() const { return changes_; }
  // Names that were opened while recording was on.
  void set_recording(bool enabled) { recording_ = enabled; }
  std::vector<std::string> opened_names() const;

  int open(int directory, const char* name, int flags, mode_t mode) override;
  int close(int fd) override;
  ssize_t read(int fd, void* buffer, std::size_t size) override;
  ssize_t write(int fd, const void* data, std::size_t size) override;
  int sync(int fd) override;
  int status(int directory, const char* name, struct stat* out) override;
  int may_write(int directory) override;
  int may_execute(int fd) override;
  int set_mode(int directory, const char* name, mode_t mode) override;
  int set_time(int directory, const char* name, std::int64_t seconds) override;
  int link(int from_directory, const char* from, int to_directory, const char* to) override;
  int rename(int from_directory, const char* from, int to_directory, const char* to,
             bool replace) override;
  int unlink(int directory, const char* name, bool is_directory) override;
  int make_directory(int directory, const char* name, mode_t mode) override;
  int list(int fd, std::vector<std::string>* names) override;
  int read_link(int fd, std::string* target) override;
  int lock(int fd, bool take) override;
  std::int64_t now() override;

 private:
  // 0, or the negated errno that the plan has for this call.
  int next(FileCall call, bool changes);
  void start_plan();

  FileLayer& real_ = FileLayer::posix();
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<std::uint64_t> changes_{0};
  std::atomic<bool> fault_happened_{false};
  std::atomic<bool> sync_enabled_{true};
  std::atomic<std::int64_t> clock_offset_{0};
  std::atomic<std::uint64_t> fail_at_{0};
  std::atomic<std::uint64_t> stop_at_{0};
  std::atomic<int> only_call_{-1};
  std::atomic<std::uint64_t> calls_of_{0};
  std::atomic<int> error_{0};
  std::atomic<bool> recording_{false};
  std::atomic<std::uint64_t> act_at_{0};
  std::function<void()> action_;
  mutable std::mutex mutex_;
  std::vector<std::string> opened_;  // guarded by mutex_
};

}  // namespace eagercache
