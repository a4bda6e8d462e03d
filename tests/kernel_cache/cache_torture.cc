// Tortures one store with many processes that are killed at random, and says in JSON what happened.
//
//   cache_torture [--seed N] [--processes N] [--keys N] [--rounds N] [--kills N] [--seconds N]
//                 [--fault-rate P] [--sync 0|1] [--root DIR]
//
// A round begins with an empty store. Workers want every key; the supervisor kills one at random
// and starts another, until `kills` were made or `seconds` passed; then all workers must finish.
// Exit status 0 when every promise held: no corrupt load, no wrong result, no stall over five
// seconds, at most one compile a key plus one a kill, and no temporary file after one clean-up.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

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

#include "kernel_cache/disk_store.h"
#include "kernel_cache/file_names.h"
#include "tests/kernel_cache/torture_worker.h"
#include "tests/support/fault_file_layer.h"
#include "tests/support/temporary_directory.h"

namespace eagercache {
namespace {

constexpr std::int64_t kStallMilliseconds = 5000;

struct Options {
  std::uint64_t seed = 1;
  std::uint64_t processes = 8;
  std::uint64_t keys = 120;
  std::uint64_t rounds = 1;
  std::uint64_t kills = 0;
  std::uint64_t seconds = 60;
  std::uint64_t sync = 0;
  double fault_rate = 0;
  std::filesystem::path root;
};

bool parse_options(int count, char** words, Options& options) {
  const std::map<std::string_view, std::uint64_t*> numbers{
      {"--seed", &options.seed},   {"--processes", &options.processes},
      {"--keys", &options.keys},   {"--rounds", &options.rounds},
      {"--kills", &options.kills}, {"--seconds", &options.seconds},
      {"--sync", &options.sync}};
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
  return count % 2 == 1 && options.processes >= 1 && options.processes <= kMaxWorkers;
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
    void* const memory = ::mmap(nullptr, sizeof(TortureBoard), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    board_ = new (memory) TortureBoard;
  }
  ~Supervisor() { ::munmap(board_, sizeof(TortureBoard)); }
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
            {"passed", passed()}};
  }

  bool passed() const {
    const std::uint64_t wanted = options_.keys * options_.rounds;
    const bool calls_failed = options_.fault_rate > 0;
    const bool killed_enough = options_.kills == 0 || kills_ > 0;
    const std::uint64_t compiles = board_->compiles_completed;
    // A failing call may lose a publish, and a full device makes room by eviction; so only healthy
    // disks promise the number of compiles, and that all keys are still there.
    const bool compiles_fit = calls_failed || (compiles >= wanted && compiles <= wanted + kills_);
    const bool keys_fit = broken_keys_ == 0 && (calls_failed || missing_keys_ == 0);
    return board_->corrupt == 0 && board_->wrong_results == 0 && hangs_ == 0 && crashes_ == 0 &&
           keys_fit && temporaries_left_ == 0 && compiles_fit && killed_enough &&
           board_->loads > 0 && (!calls_failed || board_->faults > 0);
  }

 private:
  void start_worker(int index) {
    const std::uint64_t seed = random_();
    board_->alive[static_cast<std::size_t>(index)] = steady_milliseconds();
    const pid_t child = ::fork();
    if (child == 0) ::_exit(run_torture_worker(plan_, *board_, index, seed));
    workers_[child] = index;
  }

  void run_round() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(options_.seconds);
    std::uint64_t kills_left = options_.kills / options_.rounds;
    for (int i = 0; i < static_cast<int>(options_.processes); ++i) start_worker(i);
    while (!workers_.empty()) {
      const bool killing = kills_left > 0 && std::chrono::steady_clock::now() < end;
      reap(/*restart=*/killing);
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

  void kill_stalled() {
    const std::int64_t now = steady_milliseconds();
    for (const auto& [process, index] : workers_) {
      std::atomic<std::int64_t>& alive = board_->alive[static_cast<std::size_t>(index)];
      if (now - alive < kStallMilliseconds) continue;
      ++hangs_;
      alive = now;
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
    auto store = DiskStore::open(options);
    if (!store) {
      ++crashes_;
      return;
    }
    for (std::uint64_t key = 0; key < options_.keys; ++key) {
      const auto found = store.value()->find(sha256("torture key " + std::to_string(key)));
      if (!found) {
        ++missing_keys_;
      } else if (!store.value()->verified_shared_object(found.value(), 0)) {
        ++broken_keys_;
      }
    }
    if (!store.value()->evict(false)) ++crashes_;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(
             plan_.root / kVersionDirectory / kTemporaryDirectory)) {
      ++temporaries_left_;
    }
  }

  const Options options_;
  TorturePlan plan_;
  std::mt19937_64 random_;
  TortureBoard* board_ = nullptr;
  std::map<pid_t, int> workers_;
  std::uint64_t kills_ = 0;
  std::uint64_t hangs_ = 0;
  std::uint64_t crashes_ = 0;
  std::uint64_t missing_keys_ = 0;
  std::uint64_t broken_keys_ = 0;
  std::uint64_t temporaries_left_ = 0;
};

int torture(int count, char** words) {
  Options options;
  if (!parse_options(count, words, options)) {
    std::cerr << "usage: cache_torture [--seed N] [--processes N] [--keys N] [--rounds N]"
                 " [--kills N] [--seconds N] [--fault-rate P] [--sync 0|1] [--root DIR]\n";
    return 2;
  }
  const TemporaryDirectory directory;
  Supervisor supervisor(options, options.root.empty() ? directory.path() / "store" : options.root);
  supervisor.run();
  std::cout << supervisor.report().dump(2) << std::endl;
  return supervisor.passed() ? 0 : 1;
}

}  // namespace
}  // namespace eagercache

int main(int count, char** words) { return eagercache::torture(count, words); }
