#include "kernel_cache/store/attempt_log.h"

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "kernel_cache/base/fork_guard.h"
#include "kernel_cache/format/file_names.h"

namespace eagercache {
namespace {

constexpr std::uint64_t kMaxRecordBytes = std::uint64_t{1} << 20;
constexpr std::int64_t kRecordSeconds = std::int64_t{7} * 24 * 3600;
constexpr std::size_t kLineSize = 1 + 64 + 1;

// Attempts begun and not ended, by key. What is no whole line of ours counts for nothing.
std::map<Digest, int> open_attempts(std::string_view text) {
  std::map<Digest, int> open;
  for (; text.size() >= kLineSize; text.remove_prefix(kLineSize)) {
    const auto key = Digest::from_hex(text.substr(1, 64));
    if (!key || text[kLineSize - 1] != '\n') break;
    open[*key] += text[0] == '+' ? 1 : -1;
  }
  std::erase_if(open, [](const auto& item) { return item.second <= 0; });
  return open;
}

}  // namespace

// The file in which this process notes what it tries. Its lock is held as long as the process
// lives, by which others tell the dead.
struct AttemptLog::Record {
  Record(FileLock held, std::string file) : lock(std::move(held)), name(std::move(file)) {}

  FileLock lock;
  std::string name;  // below the version directory
  std::atomic<int> open{0};
};

AttemptLog::~AttemptLog() {
  if (record_ != nullptr && record_->lock.held() && record_->open == 0) remove(record_->name);
}

bool AttemptLog::remove(const std::string& name) const {
  const auto tree = tree_.handle();
  return tree != nullptr && tree_.files().unlink(tree->directory(), name.c_str(), false) >= 0;
}

std::shared_ptr<AttemptLog::Record> AttemptLog::record() const noexcept {
  const std::scoped_lock lock(process_mutex());
  return record_;
}

void AttemptLog::open() {
  const auto tree = tree_.handle();
  if (tree == nullptr) return;
  struct stat info {};
  const std::shared_ptr<Record> known = record();
  if (known != nullptr && known->lock.held() &&
      tree_.files().status(tree->directory(), known->name.c_str(), &info) >= 0) {
    return;
  }
  const std::string name = attempt_file(tree_.environment(), new_temporary_name(false));
  Result<FileLock> lock = FileLock::try_acquire(tree_.files(), tree->directory(), name.c_str());
  // Somebody who reads records may have had it between its making and its locking, and removed it.
  const bool there = lock && tree_.files().status(lock->descriptor(), "", &info) >= 0;
  if (!there || info.st_nlink == 0) return;
  auto made = std::make_shared<Record>(std::move(lock).value(), name);
  // Swapped, so that the old one is destroyed after the mutex is released.
  const std::scoped_lock guard(process_mutex());
  record_.swap(made);
}

void AttemptLog::note(const Digest& key, bool begins) noexcept {
  const std::shared_ptr<Record> mine = record();
  if (mine == nullptr || !mine->lock.held()) return;
  mine->open += begins ? 1 : -1;
  std::array<char, kLineSize> line;
  line.front() = begins ? '+' : '-';
  line.back() = '\n';
  for (std::size_t i = 0; i < key.bytes.size(); ++i) {
    line[1 + 2 * i] = "0123456789abcdef"[key.bytes[i] >> 4];
    line[2 + 2 * i] = "0123456789abcdef"[key.bytes[i] & 15];
  }
  // In one piece, so that two threads' lines do not mix.
  tree_.files().write(mine->lock.descriptor(), line.data(), line.size());
}

// Calls visit(name, open attempts, time of the last line) for the record of every dead process.
template <typename Visit>
void AttemptLog::visit_dead(Visit visit) const {
  const auto tree = tree_.handle();
  const std::string folder = environment_folder(tree_.environment(), kAttemptsDirectory);
  const auto names = tree_.list(folder);
  if (tree == nullptr || !names) return;
  for (const std::string& leaf : names.value()) {
    const std::string name = folder + "/" + leaf;
    const auto parsed = parse_name(name);
    if (!parsed || parsed->kind != NameKind::kAttempts) continue;
    // Held by its owner, in this process or another one, for as long as that lives.
    const auto lock = FileLock::try_acquire(tree_.files(), tree->directory(), name.c_str());
    if (!lock) continue;
    const auto file = tree_.read_file(name, kMaxRecordBytes);
    if (!file) continue;
    visit(name, open_attempts(file->bytes), static_cast<std::int64_t>(file->info.st_mtim.tv_sec));
  }
}

std::size_t AttemptLog::deaths(const Digest& key) const {
  std::size_t count = 0;
  visit_dead([&](const std::string& name, const std::map<Digest, int>& open, std::int64_t) {
    if (open.empty()) remove(name);
    if (open.contains(key)) ++count;
  });
  return count;
}

void AttemptLog::forget(const Digest& key) const {
  visit_dead([&](const std::string& name, const std::map<Digest, int>& open, std::int64_t) {
    if (open.contains(key)) remove(name);
  });
}

std::uint64_t AttemptLog::sweep() const {
  std::uint64_t removed = 0;
  const std::int64_t now = tree_.files().now();
  visit_dead([&](const std::string& name, const std::map<Digest, int>& open, std::int64_t time) {
    if ((open.empty() || now - time > kRecordSeconds) && remove(name)) ++removed;
  });
  return removed;
}

}  // namespace eagercache
