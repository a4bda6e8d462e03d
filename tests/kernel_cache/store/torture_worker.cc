#include "tests/kernel_cache/store/torture_worker.h"

#include <sys/prctl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "kernel_cache/loading/shared_library.h"
#include "kernel_cache/store/disk_store.h"
#include "tests/kernel_cache/test_objects.h"
#include "tests/support/fault_file_layer.h"

namespace eagercache {
namespace {

// Fails calls by chance instead of by number.
class RandomFaultLayer final : public FaultFileLayer {
 public:
  RandomFaultLayer(double rate, std::uint64_t seed, TortureBoard& board)
      : rate_(rate), random_(seed), board_(board) {}

  // Makes one of the next calls fail, or none.
  void roll() {
    if (rate_ <= 0) return;
    static constexpr std::array kErrors{ENOSPC, EDQUOT, EIO,    EMFILE, ENOMEM,
                                        EROFS,  EACCES, ESTALE, EINTR,  EBUSY};
    if (fault_happened()) ++board_.faults;
    std::geometric_distribution<std::uint64_t> distance(rate_);
    fail_call(1 + distance(random_), kErrors[random_() % kErrors.size()]);
  }

 private:
  const double rate_;
  std::mt19937_64 random_;
  TortureBoard& board_;
};

class Worker {
 public:
  Worker(const TorturePlan& plan, TortureBoard& board, int index, std::uint64_t seed)
      : plan_(plan),
        board_(board),
        index_(index),
        random_(seed),
        files_(plan.fault_rate, seed, board) {}

  int run() {
    files_.set_sync_enabled(plan_.sync);
    StoreOptions options;
    options.root = plan_.root;
    options.environment = "torture";
    options.files = &files_;
    if (plan_.max_bytes > 0) options.max_bytes = plan_.max_bytes;
    // A supervisor that is gone leaves no worker behind.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::vector<std::uint64_t> keys;
    bool another_pass = true;
    while (another_pass || !keys.empty()) {
      board_.alive[static_cast<std::size_t>(index_)] = board_.clock.load();
      files_.roll();
      if (store_ != nullptr && store_->read_only()) store_.reset();  // a failing call made it so
      if (store_ == nullptr) {
        auto opened = DiskStore::open(options);
        if (!opened) {
          ++board_.errors;
          continue;
        }
        store_ = std::move(opened).value();
      }
      if (keys.empty()) keys = shuffled_keys();
      // From the back; what is busy or failed comes again later.
      const std::uint64_t key = keys.back();
      keys.pop_back();
      if (index_ < plan_.evictors) {
        evict();
      } else if (!settle(key)) {
        keys.insert(keys.begin(), key);
        continue;
      }
      board_.settled[static_cast<std::size_t>(index_)] = board_.clock.load();
      if (keys.empty()) ++board_.passes;
      another_pass = steady_milliseconds() < plan_.until;
    }
    return 0;
  }

 private:
  std::vector<std::uint64_t> shuffled_keys() {
    std::vector<std::uint64_t> keys(plan_.keys);
    std::iota(keys.begin(), keys.end(), 0);
    std::shuffle(keys.begin(), keys.end(), random_);
    return keys;
  }

  void evict() {
    const auto result = store_->evict(false);
    if (result) board_.evicted += result->entries_removed;
  }

  // True when the key's kernel was verified, and answered if it was loaded.
  bool settle(std::uint64_t key) {
    const Digest digest = sha256("torture key " + std::to_string(key));
    auto found = store_->find(digest);
    if (!found && found.code() == StatusCode::kNotFound) {
      auto lock = store_->try_lock(digest);
      if (!lock) {
        ++(lock.code() == StatusCode::kBusy ? board_.busy : board_.errors);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        return false;
      }
      found = store_->find(digest);
      if (!found) found = compile(digest, key);
    }
    if (!found) {
      ++board_.errors;
      return false;
    }
    return load(found.value(), key);
  }

  // The fake compiler: some milliseconds of work, then a file in a work directory.
  Result<Manifest> compile(const Digest& digest, std::uint64_t key) {
    ++board_.compiles_begun;
    const auto work = store_->make_work_directory();
    if (!work) return work.status();
    const std::filesystem::path output = work.value() / "kernel.so";
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 4000));
    if (!(std::ofstream(output, std::ios::binary) << answer_object(key)).flush()) {
      return Status(StatusCode::kIoError, "the work directory was deleted");
    }
    ++board_.compiles_completed;
    Manifest manifest;
    manifest.key = digest;
    manifest.kind = EntryKind::kKernel;
    manifest.facts["number"] = std::to_string(key);
    auto published = store_->publish(manifest, {{ObjectKind::kSharedObject, output}});
    std::error_code ignored;
    std::filesystem::remove_all(work.value(), ignored);
    if (published) ++board_.published;
    return published;
  }

  bool load(const Manifest& manifest, std::uint64_t key) {
    const auto path = store_->verified_shared_object(manifest, 0);
    if (!path) {
      ++(path.code() == StatusCode::kCorrupt ? board_.corrupt : board_.errors);
      return false;
    }
    // Loading costs more than everything else and cannot be undone; one in four will do. The bytes
    // of all were compared with their hash.
    if (random_() % 4 != 0) return true;
    const auto library = SharedLibrary::open(path.value());
    if (!library) {
      ++board_.errors;
      return false;
    }
    ++board_.loads;
    if (ask(library.value()) != key) ++board_.wrong_results;
    return true;
  }

  const TorturePlan& plan_;
  TortureBoard& board_;
  const int index_;
  std::mt19937_64 random_;
  RandomFaultLayer files_;
  std::unique_ptr<DiskStore> store_;
};

}  // namespace

std::int64_t steady_milliseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

pid_t start_torture_clock(TortureBoard& board, const std::filesystem::path& folder) {
  constexpr auto kTick = std::chrono::milliseconds(10);
  constexpr std::int64_t kMostPerTick = 50;
  const std::filesystem::path probe = folder / "clock";
  const pid_t clock = ::fork();
  if (clock != 0) return clock;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (std::int64_t last = steady_milliseconds();;) {
    std::this_thread::sleep_for(kTick);
    ::mkdir(probe.c_str(), 0700);
    ::rmdir(probe.c_str());
    const std::int64_t now = steady_milliseconds();
    board.clock += std::min(now - last, kMostPerTick);
    last = now;
  }
}

int run_torture_worker(const TorturePlan& plan, TortureBoard& board, int index,
                       std::uint64_t random_seed) {
  return Worker(plan, board, index, random_seed).run();
}

}  // namespace eagercache
