#include <benchmark/benchmark.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "kernel_cache/loading/shared_library.h"
#include "kernel_cache/store/disk_store.h"
#include "tests/kernel_cache/test_objects.h"
#include "tests/support/temporary_directory.h"

// Price of the store: opening it, a miss, the first use of an entry, a publish, and how soon the
// lock of a killed process is free. In memory where that is possible (see TemporaryDirectory), so
// without the disk.
namespace eagercache {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint64_t kEntries = 1000;

Digest key_of(std::uint64_t n) { return sha256("bench key " + std::to_string(n)); }

// A store of 1,000 kernels, each of about as many bytes as the argument of the benchmark says.
class Fixture {
 public:
  explicit Fixture(std::uint64_t entries, std::size_t size = 0) : size_(size) {
    const auto store = open();
    for (std::uint64_t n = 0; n < entries; ++n) publish(*store, n);
  }

  std::unique_ptr<DiskStore> open() const {
    StoreOptions options;
    options.root = directory_.path() / "store";
    options.environment = "bench";
    return std::move(DiskStore::open(std::move(options))).value();
  }

  std::filesystem::path source(std::uint64_t n) const {
    std::string bytes = answer_object(n);
    // What is behind the sections is hashed and not loaded, like a container's larger text.
    if (bytes.size() < size_) bytes.append(size_ - bytes.size(), 'x');
    const std::filesystem::path path = directory_.path() / "kernel.so";
    write_bytes(path, bytes);
    return path;
  }

  void publish(DiskStore& store, std::uint64_t n) const { publish(store, n, source(n)); }
  static void publish(DiskStore& store, std::uint64_t n, const std::filesystem::path& source) {
    Manifest manifest;
    manifest.key = key_of(n);
    manifest.kind = EntryKind::kKernel;
    manifest.facts["call"] = std::string(600, 'c');
    if (!store.publish(manifest, {{ObjectKind::kSharedObject, source}})) std::abort();
  }

 private:
  TemporaryDirectory directory_;
  const std::size_t size_;
};

// Seconds of every single iteration; the mean alone would hide the slow ones.
class Times {
 public:
  void add(benchmark::State& state, Clock::duration time) {
    seconds_.push_back(std::chrono::duration<double>(time).count());
    state.SetIterationTime(seconds_.back());
  }
  void report(benchmark::State& state) {
    std::sort(seconds_.begin(), seconds_.end());
    const auto at = [&](double share) {
      return 1e6 *
             seconds_[static_cast<std::size_t>(share * static_cast<double>(seconds_.size() - 1))];
    };
    state.counters["median_us"] = at(0.5);
    state.counters["p99_us"] = at(0.99);
    state.counters["max_us"] = at(1);
  }

 private:
  std::vector<double> seconds_;
};

void BM_OpenAStoreOf1000Entries(benchmark::State& state) {
  const Fixture fixture(kEntries);
  Times times;
  for ([[maybe_unused]] auto _ : state) {
    const auto start = Clock::now();
    const auto store = fixture.open();
    times.add(state, Clock::now() - start);
  }
  times.report(state);
}
BENCHMARK(BM_OpenAStoreOf1000Entries)->UseManualTime()->Unit(benchmark::kMicrosecond);

void BM_Miss(benchmark::State& state) {
  const Fixture fixture(kEntries);
  const auto store = fixture.open();
  std::uint64_t n = kEntries;
  for ([[maybe_unused]] auto _ : state) benchmark::DoNotOptimize(store->find(key_of(n++)));
}
BENCHMARK(BM_Miss)->Unit(benchmark::kMicrosecond);

// Find, the question whether processes died of it, verify, load, one symbol.
void BM_FirstUse(benchmark::State& state) {
  const Fixture fixture(static_cast<std::uint64_t>(state.max_iterations),
                        static_cast<std::size_t>(state.range(0)));
  const auto store = fixture.open();
  Times times;
  std::uint64_t n = 0;
  for ([[maybe_unused]] auto _ : state) {
    const auto start = Clock::now();
    const auto found = store->find(key_of(n));
    if (!store->check_attempts(key_of(n))) std::abort();
    store->note_attempt(key_of(n), true);
    const auto path = store->verified_shared_object(found.value(), 0);
    const auto library = SharedLibrary::open(path.value());
    store->note_attempt(key_of(n), false);
    if (library->symbol("answer") == nullptr) std::abort();
    times.add(state, Clock::now() - start);
    if (ask(library.value()) != n++) std::abort();
  }
  times.report(state);
}
BENCHMARK(BM_FirstUse)
    ->Arg(0)
    ->Arg(350'000)
    ->Arg(2'000'000)
    // Nothing is ever unloaded, and a process loads 2,000 objects at most: 3 sizes, 9 repetitions.
    ->Iterations(60)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

void BM_Publish(benchmark::State& state) {
  const Fixture fixture(0);
  const auto store = fixture.open();
  Times times;
  std::uint64_t n = 0;
  for ([[maybe_unused]] auto _ : state) {
    const auto source = fixture.source(n);
    const auto start = Clock::now();
    Fixture::publish(*store, n++, source);
    times.add(state, Clock::now() - start);
  }
  times.report(state);
}
BENCHMARK(BM_Publish)->Iterations(100)->UseManualTime()->Unit(benchmark::kMicrosecond);

// The holder has a child that runs another program, like a compiler, and that lives on.
void BM_LockIsFreeAfterItsHolderIsKilled(benchmark::State& state) {
  const Fixture fixture(0);
  const auto store = fixture.open();
  Times times;
  for ([[maybe_unused]] auto _ : state) {
    int ready[2];
    if (::pipe(ready) != 0) std::abort();
    const pid_t holder = ::fork();
    if (holder == 0) {
      const auto mine = fixture.open();
      const auto lock = mine->try_lock(key_of(0));
      const pid_t compiler = ::fork();
      if (compiler == 0) {
        ::execl("/bin/sleep", "sleep", "60", static_cast<char*>(nullptr));
        ::_exit(1);
      }
      if (lock && ::write(ready[1], &compiler, sizeof compiler) > 0) ::pause();
      ::_exit(1);
    }
    pid_t compiler = 0;
    if (::read(ready[0], &compiler, sizeof compiler) != sizeof compiler) std::abort();
    const auto start = Clock::now();
    ::kill(holder, SIGKILL);
    while (!store->try_lock(key_of(0))) {
    }
    times.add(state, Clock::now() - start);
    if (::kill(compiler, SIGKILL) != 0) std::abort();
    ::waitpid(holder, nullptr, 0);
    ::close(ready[0]);
    ::close(ready[1]);
  }
  times.report(state);
}
BENCHMARK(BM_LockIsFreeAfterItsHolderIsKilled)
    ->Iterations(100)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace eagercache
