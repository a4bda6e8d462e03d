// Runtime: the end of the process, for programs that do not call shut_down().

#include <chrono>
#include <cstdlib>
#include <mutex>

#include "dispatcher/runtime/runtime.h"
#include "kernel_cache/base/digest.h"

namespace eagercache {
namespace {

// What is under way then is reading, hashing and loading one kernel each. Where a file system does
// not answer, the process ends nevertheless.
constexpr std::chrono::seconds kExitPatience{5};

}  // namespace

void Runtime::stop_at_exit() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Handlers run in the reverse order: ours before libcrypto's, which takes away what hashing
    // uses, and before the destructors of what exists now, libtorch's among them.
    prepare_libcrypto();
    std::atexit([] { Runtime::instance().stop_for_exit(); });
  });
}

void Runtime::stop_for_exit() {
  if (forked()) {
    return;  // the locks may be held by threads that do not exist here, and nothing is under way
  }
  hooks_answer.store(false, std::memory_order_relaxed);
  exiting_.store(true);
  const auto until = std::chrono::steady_clock::now() + kExitPatience;
  std::thread loader;
  {
    Lock lock(queue_mutex_);
    stopping_ = true;
    loader = std::move(loader_);
    queue_changed_.notify_all();
    lock.wait_until(queue_changed_, until,
                    [this]() EAGERCACHE_REQUIRES(queue_mutex_) { return processing_ == 0; });
    if (processing_ != 0 && loader.joinable()) {
      loader.detach();
    }
  }
  if (loader.joinable()) {
    loader.join();
  }
  while (asking_.load() != 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace eagercache
