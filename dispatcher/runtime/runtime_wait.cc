// Runtime: callers that wait for a verdict (OnMiss::kWait), each with an end of its own.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

#include "dispatcher/base/log.h"
#include "dispatcher/runtime/miss_handler.h"
#include "dispatcher/runtime/runtime.h"

namespace eagercache {
namespace {

using Seconds = std::chrono::duration<double>;

// Who waits looks up so often, to see whether it is interrupted.
constexpr Seconds kWaitSlice{0.2};

}  // namespace

// Native has answered already: to stop waiting costs nothing but the kernel.
void Runtime::wait_for_verdict(MissHandler& handler, const std::shared_ptr<Ticket>& ticket) {
  using Clock = std::chrono::steady_clock;
  const double seconds = wait_seconds_.load();
  const Clock::time_point begin = Clock::now();
  const auto left = [&] { return Seconds(seconds) - (Clock::now() - begin); };
  bool done = false;
  handler.run_blocking([&] {
    Lock lock(ticket->mutex);
    const Seconds slice = std::clamp<Seconds>(left(), Seconds::zero(), kWaitSlice);
    done = lock.wait_for(ticket->done_changed, slice,
                         [&]() EAGERCACHE_REQUIRES(ticket->mutex) { return ticket->done; });
    return done || left() <= Seconds::zero();
  });
  if (!done && left() <= Seconds::zero()) {
    waited_in_vain_.store(true);
    warn_once("wait",
              "a call waited " + std::to_string(std::llround(seconds)) +
                  " s for its kernel (EAGERCACHE_WAIT_SECONDS); native answers, and no call waits "
                  "until some kernel is done. EAGERCACHE_LOG=info says what is compiled");
  }
}

}  // namespace eagercache
