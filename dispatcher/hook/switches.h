#pragma once

#include <atomic>
#include <cstdint>

// What every call of a hook reads of the process: a relaxed load each. The runtime sets them.
namespace eagercache {

// Whether hooks answer in this process right now: enabled, and not in a forked child. Flipping it
// is the only way to leave (removing an override under load crashes PyTorch).
inline std::atomic<bool> hooks_answer{false};

// Whether no further kernel may become an answer. Runtime::freeze() sets it.
inline std::atomic<bool> kernels_frozen{false};

// The epoch of runs of native calls (counters.h): another one after each change of policy, 0 where
// every call is to be looked at.
inline std::atomic<std::uint32_t> native_run_epoch{0};

// Another number after each change of policy or of a function's code.
inline std::atomic<std::uint64_t> verdict_generation{0};

}  // namespace eagercache
