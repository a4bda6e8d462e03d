#include "dispatcher/hook/sketched_runs.h"

#include <array>

#include "dispatcher/base/thread_blocks.h"

namespace eagercache {
namespace {

struct Run {
  std::uint64_t of = 0;  // hook and sketch; another one takes its place
  LongRun length;
};
constexpr std::size_t kRuns = 256;

// One thread's, which alone reads and writes them.
struct ThreadRuns {
  std::array<Run, kRuns> runs{};
};

// A plain pointer at a fixed offset from the thread pointer: a hit may read it.
[[gnu::tls_model("initial-exec")]] thread_local ThreadRuns* thread_runs = nullptr;

constexpr std::uint64_t name_of(std::size_t hook, std::uint64_t sketch) {
  return sketch ^ (hook * 0x9e3779b97f4a7c15);
}

Run& run_of(ThreadRuns& all, std::uint64_t name) { return all.runs[(name >> 32) % kRuns]; }

}  // namespace

void count_of_sketch(std::size_t hook, std::uint32_t epoch, std::uint64_t sketch) noexcept {
  HookSlots& slots = hook_slots(hook);
  slots.count(CallOutcome::kNative);
  slots.sketched_epoch = epoch;
  if (thread_runs == nullptr) [[unlikely]] {
    thread_runs = &ThreadBlocks<ThreadRuns>::own();
  }
  const std::uint64_t name = name_of(hook, sketch);
  Run& run = run_of(*thread_runs, name);
  if (run.of != name) {
    run = {name, {}};
  }
  run.length.count(epoch);
}

bool passes_unseen_of_sketch(std::size_t hook, std::uint32_t epoch, std::uint64_t sketch) noexcept {
  if (thread_runs == nullptr) {
    return false;
  }
  const std::uint64_t name = name_of(hook, sketch);
  Run& run = run_of(*thread_runs, name);
  if (run.of != name || !run.length.passes(epoch)) {
    return false;
  }
  count_call(hook, CallOutcome::kNative);
  return true;
}

void bar_sketch(std::size_t hook, std::uint32_t epoch, std::uint64_t sketch) noexcept {
  if (thread_runs == nullptr) {
    return;
  }
  const std::uint64_t name = name_of(hook, sketch);
  Run& run = run_of(*thread_runs, name);
  if (run.of == name) {
    run.length.bar(epoch);
  }
}

}  // namespace eagercache
