#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <list>
#include <vector>

#include "dispatcher/device/cuda_graph.h"

namespace eagercache {

// Calls of both kinds by turns, and which one is faster: the program's own, on its stream. What a
// call takes is the time between its first and its last work there, in which the device waits for a
// host that is slower. Its owner's lock guards it, and may be released during a call.
class ReplayTrial {
 public:
  enum class Verdict { kOpen, kReplay, kRun };
  struct Times {
    float device = 0;  // milliseconds
    float host = 0;
  };
  // One call that is being timed, or was.
  class Call {
    friend class ReplayTrial;
    StreamTimer timer_;
    std::chrono::steady_clock::time_point began_;
    bool replayed_ = false;
    bool ended_ = false;
    bool lost_ = false;
    float host_ = 0;
  };

  // What the next call is to do; the other one after it.
  bool replays_next() const noexcept { return replays_next_; }
  // Before a call of that kind; nullptr when it is not timed. Good until it has ended.
  Call* begin(void* stream) noexcept;
  void end(Call* call, void* stream) noexcept;
  Verdict verdict() noexcept;
  // By median, of calls run and replayed; once there is a verdict.
  Times run() const noexcept { return median_[0]; }
  Times replayed() const noexcept { return median_[1]; }

  // A call of one kind, as if it had been timed.
  void add(bool replayed, Times times);

 private:
  static constexpr std::size_t kSamples = 7;  // of each kind
  static constexpr std::size_t kInFlight = 16;

  bool replays_next_ = false;
  std::list<Call> calls_;  // that have not been counted, in order
  std::array<std::vector<Times>, 2> samples_;
  std::array<Times, 2> median_{};
};

}  // namespace eagercache
