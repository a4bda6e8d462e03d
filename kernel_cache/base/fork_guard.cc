#include "kernel_cache/base/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>

namespace eagercache {
namespace {

constexpr int kSlots = 1024;  // four times the lock files that exist

struct ForkState {
  std::atomic<std::uint64_t> generation{1};
  std::mutex mutex;
  // Descriptor + 1; 0 is a free slot.
  std::array<std::atomic<int>, kSlots> descriptors{};
};

ForkState* state_pointer = nullptr;

void before_fork() { state_pointer->mutex.lock(); }

void in_parent() { state_pointer->mutex.unlock(); }

void in_child() {
  // Closing does not unlock: the lock belongs to the open file that the parent still has. LOCK_UN
  // here would free the parent's lock.
  for (std::atomic<int>& slot : state_pointer->descriptors) {
    const int held = slot.exchange(0, std::memory_order_relaxed);
    if (held != 0) ::close(held - 1);
  }
  state_pointer->generation.fetch_add(1, std::memory_order_relaxed);
  state_pointer->mutex.unlock();
}

ForkState& state() noexcept {
  // Leaked: locks may be released by threads that outlive static destructors.
  static ForkState& instance = []() -> ForkState& {
    state_pointer = new ForkState;
    ::pthread_atfork(before_fork, in_parent, in_child);
    return *state_pointer;
  }();
  return instance;
}

}  // namespace

std::uint64_t fork_generation() noexcept {
  return state().generation.load(std::memory_order_relaxed);
}

std::mutex& process_mutex() noexcept { return state().mutex; }

int close_in_child(int fd) noexcept {
  ForkState& shared = state();
  for (int slot = 0; slot < kSlots; ++slot) {
    int expected = 0;
    if (shared.descriptors[static_cast<std::size_t>(slot)].compare_exchange_strong(
            expected, fd + 1, std::memory_order_relaxed)) {
      return slot;
    }
  }
  return -1;
}

void forget_inherited(int slot) noexcept {
  if (slot >= 0) {
    state().descriptors[static_cast<std::size_t>(slot)].store(0, std::memory_order_relaxed);
  }
}

}  // namespace eagercache
