// Tortures one store with many processes that are killed at random, and says in JSON what happened.
//
//   cache_torture [--seed N] [--processes N] [--keys N] [--rounds N] [--seconds N] [--kills N]
//                 [--evictors N] [--wipe-every MS] [--fault-rate P] [--sync 0|1] [--on-disk 0|1]
//                 [--root DIR]
//
// A round begins with an empty store. Workers want every key, again and again for `seconds`; the
// supervisor kills one at random and starts another until `kills` were made (over all rounds), and
// every so many milliseconds deletes a folder of the store, or all of it; the first `evictors`
// workers hold the store to a twentieth of what the others want. Then all workers must finish.
// Exit status 0 when every promise held: no corrupt load, no wrong result, no stall over five
// seconds and nobody who gets nowhere for a minute (of a clock that stands still when the disk
// does), at most one compile a key plus one a kill, the cap kept, and no temporary file after one
// clean-up.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernel_cache/format/file_names.h"
#include "kernel_cache/store/disk_store.h"
#include "tests/kernel_cache/store/torture_worker.h"
#include "tests/kernel_cache/test_objects.h"
#include "tests/support/fault_file_layer.h"
#include "tests/support/temporary_directory.h"

namespace eagercache {
namespace {

constexpr std::int64_t kStallMilliseconds = 5000;
constexpr std::int64_t kNowhereMilliseconds = 60'000;

struct Options {
  std::uint64_t seed = 1;
  std::uint64_t processes = 8;
  std::uint64_t keys = 120;
  std::uint64_t rounds = 1;
  std::uint64_t kills = 0;
  std::uint64_t seconds = 0;
  std::uint64_t evictors = 0;
  std::uint64_t wipe_every = 0;
  std::uint64_t sync = 0;
  std::uint64_t on_disk = 0;
  double fault_rate = 0;
  std::filesystem::path root;
};

bool parse_options(int count, char** words, Options& options) {
  const std::map<std::string_view, std::uint64_t*> numbers{
      {"--seed", &options.seed},       {"--processes", &options.processes},
      {"--keys", &options.keys},       {"--rounds", &options.rounds},
      {"--kills", &options.kills},     {"--seconds", &options.seconds},
      {"--sync", &options.sync},       {"--evictors", &options.evictors},
      {"--on-disk", &options.on_disk}, {"--wipe-every", &options.wipe_every}};
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string_view name = words[i];
    const std::string_view value = words[i + 1];
    if (name == "--root") {
      options.root = value;
      continue;
    }
    const auto parse = [&](auto& target) {
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), target);
      return error == std::errc{} && end == value.data() + value.size();
    };
    if (name == "--fault-rate") {
      if (!parse(options.fault_rate)) return false;
      continue;
    }
    const auto number = numbers.find(name);
    if (number == numbers.end() || !parse(*number->second)) return false;
  }
  return count % 2 == 1 && options.processes >= 1 && options.processes <= kMaxWorkers &&
         options.evictors < options.processes && options.rounds >= 1;
}

class Supervisor {
 public:
  Supervisor(const Options& options, const std::filesystem::path& root)
      : options_(options), random_(options.seed) {
    plan_.root = root;
    plan_.seed = options.seed;
    plan_.keys = options.keys;
    plan_.fault_rate = options.fault_rate;
    plan_.sync = options.sync != 0;
    plan_.evictors = static_cast<int>(options.evictors);
    if (options.evictors > 0) plan_.max_bytes = options.keys * answer_object(0).size() / 20;
    void* const memory = ::mmap(nullptr, sizeof(TortureBoard), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    board_ = new (memory) TortureBoard;
    std::filesystem::create_directories(root.parent_path());
    clock_ = start_torture_clock(*board_, root.parent_path());
  }
  ~Supervisor() {
    ::kill(clock_, SIGKILL);
    ::waitpid(clock_, nullptr, 0);
    ::munmap(board_, sizeof(TortureBoard));
  }
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  void run() {
    for (std::uint64_t round = 0; round < options_.rounds; ++round) {
      std::filesystem::remove_all(plan_.root);
      run_round();
      check_store();
    }
  }

  nlohmann::json report() const {
    return {{"seed", options_.seed},
            {"processes", options_.processes},
            {"keys", options_.keys},
            {"rounds", options_.rounds},
            {"fault_rate", options_.fault_rate},
            {"kills", kills_},
            {"wipes", wipes_},
            {"evicted", board_->evicted.load()},
            {"compiles_begun", board_->compiles_begun.load()},
            {"compiles_completed", board_->compiles_completed.load()},
            {"published", board_->published.load()},
            {"loads", board_->loads.load()},
            {"busy", board_->busy.load()},
            {"errors", board_->errors.load()},
            {"faults", board_->faults.load()},
            {"passes", board_->passes.load()},
            {"corrupt_loads", board_->corrupt.load()},
            {"wrong_results", board_->wrong_results.load()},
            {"hangs", hangs_},
            {"crashes", crashes_},
            {"missing_keys", missing_keys_},
            {"broken_keys", broken_keys_},
            {"temporaries_left", temporaries_left_},
            {"caps_passed", caps_passed_},
            {"passed", passed()}};
  }

  bool passed() const {
    const std::uint64_t wanted = options_.keys * options_.rounds;
    const bool calls_failed = options_.fault_rate > 0;
    const bool as_planned = kills_ >= options_.kills / options_.rounds * options_.rounds &&
                            (!calls_failed || board_->faults > 0) &&
                            (options_.wipe_every == 0 || wipes_ > 1) &&
                            (options_.evictors == 0 || board_->evicted > 0);
    const std::uint64_t compiles = board_->compiles_completed;
    // A failing call may lose a publish, and a full device makes room by eviction; so only healthy
    // disks promise the number of compiles, and that all keys are still there.
    const bool keys_go = calls_failed || options_.evictors > 0 || options_.wipe_every > 0;
    const bool compiles_fit = keys_go || (compiles >= wanted && compiles <= wanted + kills_);
    const bool keys_fit = broken_keys_ == 0 && (keys_go || missing_keys_ == 0);
    return board_->corrupt == 0 && board_->wrong_results == 0 && hangs_ == 0 && crashes_ == 0 &&
           keys_fit && temporaries_left_ == 0 && caps_passed_ == 0 && compiles_fit && as_planned &&
           board_->loads > 0;
  }

 private:
  void start_worker(int index) {
    const std::uint64_t seed = random_();
    board_->alive[static_cast<std::size_t>(index)] = board_->clock.load();
    board_->settled[static_cast<std::size_t>(index)] = board_->clock.load();
    const pid_t child = ::fork();
    if (child == 0) ::_exit(run_torture_worker(plan_, *board_, index, seed));
    workers_[child] = index;
  }

  void run_round() {
    plan_.until = steady_milliseconds() + static_cast<std::int64_t>(options_.seconds) * 1000;
    next_wipe_ = steady_milliseconds() + static_cast<std::int64_t>(options_.wipe_every);
    std::uint64_t kills_left = options_.kills / options_.rounds;
    for (int i = 0; i < static_cast<int>(options_.processes); ++i) start_worker(i);
    while (!workers_.empty()) {
      const bool killing = kills_left > 0;
      reap(/*restart=*/killing);
      wipe_when_due();
      if (killing) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % 12'000));
        reap(true);
        if (kill_one()) --kills_left;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      kill_stalled();
    }
  }

  bool kill_one() {
    if (workers_.empty()) return false;
    auto victim = workers_.begin();
    std::advance(victim, static_cast<std::ptrdiff_t>(random_() % workers_.size()));
    const auto [process, index] = *victim;
    if (::kill(process, SIGKILL) != 0) return false;
    int status = 0;
    ::waitpid(process, &status, 0);
    workers_.erase(victim);
    ++kills_;
    start_worker(index);
    return true;
  }

  void wipe_when_due() {
    const std::int64_t now = steady_milliseconds();
    if (options_.wipe_every == 0 || now < next_wipe_ || now >= plan_.until) return;
    std::error_code ignored;
    std::filesystem::remove_all(wipes_ % 4 == 0 ? plan_.root : a_folder(), ignored);
    ++wipes_;
    next_wipe_ = steady_milliseconds() + static_cast<std::int64_t>(options_.wipe_every);
  }

  // Any folder of the store: a deletion that is interrupted, or meets a writer, takes some alone.
  std::filesystem::path a_folder() {
    std::vector<std::filesystem::path> folders{plan_.root};
    std::error_code ignored;
    for (std::filesystem::recursive_directory_iterator each(plan_.root, ignored), end; each != end;
         each.increment(ignored)) {
      if (!each->is_directory(ignored)) continue;
      if (each->path().filename().native().size() == 2) continue;  // a part of one, of 256
      folders.push_back(each->path());
    }
    return folders[random_() % folders.size()];
  }

  void kill_stalled() {
    const std::int64_t now = board_->clock;
    for (const auto& [process, index] : workers_) {
      std::atomic<std::int64_t>& alive = board_->alive[static_cast<std::size_t>(index)];
      std::atomic<std::int64_t>& settled = board_->settled[static_cast<std::size_t>(index)];
      if (now - alive < kStallMilliseconds && now - settled < kNowhereMilliseconds) continue;
      ++hangs_;
      alive = settled = now;
      ::kill(process, SIGKILL);
    }
  }

  void reap(bool restart) {
    int status = 0;
    for (pid_t process = 0; (process = ::waitpid(-1, &status, WNOHANG)) > 0;) {
      const auto worker = workers_.find(process);
      if (worker == workers_.end()) continue;
      const int index = worker->second;
      workers_.erase(worker);
      if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) ++crashes_;
      if (restart) start_worker(index);
    }
  }

  // After the storm: every key there and whole, and one clean-up leaves no temporary.
  void check_store() {
    StoreOptions options;
    options.root = plan_.root;
    options.environment = "torture";
    if (plan_.max_bytes > 0) options.max_bytes = plan_.max_bytes;
    auto store = DiskStore::open(options);
    if (!store) {
      ++crashes_;
      return;
    }
    for (std::uint64_t key = 0; key < options_.keys; ++key) {
      const Digest digest = sha256("torture key " + std::to_string(key));
      const auto found = store.value()->find(digest);
      if (!found) {
        ++missing_keys_;
      } else if (!store.value()->verified_shared_object(found.value(), 0)) {
        // A deletion that meets a publish may leave an entry without its object. Whoever meets it
        // puts it aside.
        const bool is_put_aside = !store.value()->find(digest);
        ++(options_.wipe_every > 0 && is_put_aside ? missing_keys_ : broken_keys_);
      }
    }
    if (!store.value()->evict(false)) ++crashes_;
    if (plan_.max_bytes > 0) {
      std::uint64_t bytes = 0;
      std::uint64_t largest = 0;
      const Status listed = store.value()->for_each(true, [&](const EntryInfo& entry) {
        bytes += entry.bytes;
        largest = std::max(largest, entry.bytes);
      });
      if (!listed || bytes > plan_.max_bytes + largest) ++caps_passed_;
    }
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(
             plan_.root / kVersionDirectory / kTemporaryDirectory)) {
      ++temporaries_left_;
    }
  }

  const Options options_;
  TorturePlan plan_;
  std::mt19937_64 random_;
  TortureBoard* board_ = nullptr;
  pid_t clock_ = -1;
  std::int64_t next_wipe_ = 0;
  std::map<pid_t, int> workers_;
  std::uint64_t kills_ = 0;
  std::uint64_t wipes_ = 0;
  std::uint64_t hangs_ = 0;
  std::uint64_t crashes_ = 0;
  std::uint64_t missing_keys_ = 0;
  std::uint64_t broken_keys_ = 0;
  std::uint64_t temporaries_left_ = 0;
  std::uint64_t caps_passed_ = 0;
};

int torture(int count, char** words) {
  Options options;
  if (!parse_options(count, words, options)) {
    std::cerr << "usage: cache_torture [--seed N] [--processes N] [--keys N] [--rounds N]"
                 " [--seconds N] [--kills N] [--evictors N] [--wipe-every MS] [--fault-rate P]"
                 " [--sync 0|1] [--on-disk 0|1] [--root DIR]\n";
    return 2;
  }
  const TemporaryDirectory directory(options.on_disk != 0 ? TemporaryDirectory::Place::kDisk
                                                          : TemporaryDirectory::Place::kMemory);
  Supervisor supervisor(options, options.root.empty() ? directory.path() / "store" : options.root);
  supervisor.run();
  std::cout << supervisor.report().dump(2) << std::endl;
  return supervisor.passed() ? 0 : 1;
}

}  // namespace
}  // namespace eagercache

int main(int count, char** words) { return eagercache::torture(count, words); }
